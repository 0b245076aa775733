"""Faults of what a rank computes: the loss, the vocabulary's shards, the layers' shards."""

from __future__ import annotations

from tests.mutants.fault import EVALUATION, RUN, TOKENS, Fault, parity

LOSS = (
    Fault(
        name="gradients-averaged-over-ranks",
        history="meta-pytorch/torchtune#2172",
        file="parallel/data.py",
        old="module.set_gradient_divide_factor(1.0)",
        new="module.set_gradient_divide_factor(float(layout.num_data_ranks))",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="divided-by-local-tokens",
        history="PrimeIntellect-ai/prime-rl#1960",
        file="trainer/step.py",
        old="return int(mesh.sum_over(counted, mesh.data_axes).item())",
        new="return int(counted.item()) * mesh.layout.num_data_ranks",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="mean-of-micro-batch-means",
        history="huggingface/transformers#34191",
        file="trainer/step.py",
        old="one = _batch_loss(sharded, batch) / total",
        new="one = _batch_loss(sharded, batch) / max(1, num_targets([batch]) * len(batches))",
        proof=TOKENS + "test_accumulation_and_ranks_with_uneven_token_counts",
    ),
    Fault(
        name="last-window-divided-as-a-full-one",
        history="huggingface/transformers#38837",
        file="trainer/step.py",
        old="    loss = _accumulate(sharded, batches, max(1, total_targets))\n",
        new="    num_rows = len(batches) * train.micro_batch * mesh.layout.num_data_ranks\n"
        "    full = max(1, total_targets) * train.global_batch / num_rows\n"
        "    loss = _accumulate(sharded, batches, full)\n",
        proof=RUN + "[{'tp': 2}]",
    ),
    Fault(
        name="divided-again-by-accumulation",
        history="huggingface/accelerate#3533",
        file="trainer/step.py",
        old="one.backward()",
        new="(one / len(batches)).backward()",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="reported-loss-times-tp",
        history="huggingface/transformers#39648",
        file="trainer/step.py",
        old="sum_over(loss, mesh.data_axes)\n\n",
        new='sum_over(loss, (*mesh.data_axes, "tp"))\n\n',
        proof=TOKENS + "test_tensor_parallel_does_not_multiply_the_loss",
    ),
    Fault(
        name="reported-loss-of-one-rank",
        history="huggingface/transformers#13681",
        file="trainer/step.py",
        old="return mesh.sum_over(loss, mesh.data_axes)\n\n",
        new="return loss * mesh.layout.num_data_ranks\n\n",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="tokens-counted-on-every-tp-rank",
        history="PrimeIntellect-ai/prime-rl#2562",
        file="trainer/step.py",
        old="sum_over(counted, mesh.data_axes)",
        new='sum_over(counted, (*mesh.data_axes, "tp"))',
        proof=parity("LL-tp=2"),
    ),
    Fault(
        name="labels-not-shifted",
        history="macrocosm-os/pretraining#64",
        file="trainer/loss.py",
        old="labels[:, 1:], (0, 1)",
        new="labels, (0, 0)",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="labels-shifted-twice",
        history="huggingface/transformers#46784",
        file="trainer/loss.py",
        old="labels[:, 1:], (0, 1)",
        new="labels[:, 2:], (0, 2)",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="labels-shifted-across-rows",
        history="huggingface/transformers#47394",
        file="trainer/loss.py",
        old="torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)",
        new="labels.flatten().roll(-1).view_as(labels)",
        proof="tests/unit/test_loss.py::test_labels_are_shifted_within_a_row",
    ),
    Fault(
        name="ignored-tokens-not-left-out",
        history="PaddlePaddle/Paddle#28622",
        file="trainer/loss.py",
        old="trained = labels != IGNORE",
        new="trained = torch.ones_like(labels, dtype=torch.bool)",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="weight-gradient-of-the-last-chunk-only",
        history="fla-org/flash-linear-attention#874",
        file="trainer/loss.py",
        old="self.weight.addmm_(logits_grad.T, hidden[rows])",
        new="torch.mm(logits_grad.T, hidden[rows], out=self.weight)",
        proof="tests/unit/test_loss.py::test_sum_and_gradients_over_chunks[1000]",
    ),
    Fault(
        name="chunks-weight-gradient-summed-in-bf16",
        history="axolotl-ai-cloud/axolotl#1601",
        file="trainer/loss.py",
        old="torch.float32 if several else weight.dtype",
        new="weight.dtype",
        proof="tests/unit/test_loss.py::test_bf16_logits_and_gradients_are_summed_in_fp32",
    ),
    Fault(
        name="gradients-scaled-again-by-a-second-pass",
        history="Dao-AILab/quack#209",
        file="trainer/loss.py",
        old="hidden, weight = hidden * grad, None if weight is None else weight * grad",
        new="hidden, weight = hidden.mul_(grad), weight.mul_(grad)",
        proof=parity("LL321T-pp=2-pipeline_schedule=zbv"),
    ),
    Fault(
        name="loss-rounded-to-bf16",
        history="Modalities/modalities#464",
        file="trainer/loss.py",
        old="log_norms = powers.sum(-1).log() + maxima",
        new="log_norms = (powers.sum(-1).log() + maxima).to(hidden.dtype).float()",
        proof="tests/unit/test_loss.py::test_bf16_logits_and_gradients_are_summed_in_fp32",
    ),
    Fault(
        name="evaluation-divided-by-local-tokens",
        history="Liquid4All/liquid-finetune#38",
        file="trainer/step.py",
        old="total = max(1, _count(batches, mesh))",
        new="total = max(1, num_targets(batches))",
        proof=EVALUATION + "[{'fsdp': 2}]",
    ),
)

VOCABULARY = (
    Fault(
        name="embedding-rows-of-others-not-masked",
        history="pytorch/pytorch#130725",
        file="parallel/tensor.py",
        old="x.masked_fill(elsewhere.unsqueeze(-1), 0)",
        new="x",
        proof=parity("LL-tp=2"),
    ),
    Fault(
        name="padding-row-by-the-whole-numbering",
        history="pytorch/torchtitan#4637",
        file="parallel/tensor.py",
        old="padding - rows.start if padding is not None and padding in rows else None",
        new="padding if padding is not None and padding < len(rows) else None",
        proof=parity("LL-tp=2"),
    ),
    Fault(
        name="vocabulary-padding-in-the-softmax",
        history="NVIDIA/Megatron-LM#1754",
        file="trainer/loss.py",
        old="log_norms = powers.sum(-1).log() + maxima",
        new="num_padded = -len(vocab) % 64\n"
        "    log_norms = (powers.sum(-1) + num_padded * (-maxima).exp()).log() + maxima",
        proof=parity("LL321-tp=2"),
    ),
    Fault(
        name="largest-logit-not-reduced",
        history="bigscience-workshop/Megatron-DeepSpeed#394",
        file="trainer/loss.py",
        old="_over_vocabulary(log_norms, targets, group)\n    softmax",
        new="_over_vocabulary(log_norms - maxima, targets, group)\n"
        "        log_norms = log_norms + maxima\n"
        "    softmax",
        proof=parity("LL-tp=2"),
    ),
    Fault(
        name="target-counted-on-every-rank",
        history="apple/ml-cross-entropy#42",
        file="trainer/loss.py",
        old="logits.gather(1, ids)[:, 0].masked_fill(~here, 0.0)",
        new="logits.gather(1, ids)[:, 0]",
        proof=parity("LL-tp=2"),
    ),
    Fault(
        name="no-gradient-where-the-target-is-not",
        history="modelscope/ms-swift#9947",
        file="trainer/loss.py",
        old="softmax.scatter_add_(1, ids, -here.float()[:, None])",
        new="softmax.scatter_add_(1, ids, -here.float()[:, None]).mul_(here[:, None])",
        proof=parity("LL-tp=2"),
    ),
    Fault(
        name="gradient-of-the-heads-input-not-summed",
        history="apple/ml-cross-entropy#42",
        file="trainer/step.py",
        old="hidden = region_of(mesh).enter(hidden)",
        new="pass",
        proof=parity("LL-tp=2"),
    ),
    Fault(
        name="gathered-logits-with-padding",
        history="huggingface/transformers#48824",
        file="parallel/collectives.py",
        old="torch.cat(chunks, dim=-1)[..., :size]",
        new="torch.cat(chunks, dim=-1)",
        proof="tests/serve/test_generation.py::test_greedy_tokens_equal_generate[LL321T-2]",
    ),
    Fault(
        name="tied-weight-untied-by-loading",
        history="verl-project/verl#7834",
        file="weights/load.py",
        old="sharded = parallelize(lambda: build_on_meta(source, at_rest), plan, facts, mesh"
        ", dtype)",
        new="def build():\n"
        "        model = build_on_meta(source, at_rest)\n"
        "        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())\n"
        "        return model\n\n"
        '    ShardedModel.is_copy = lambda self, part, name: name == "lm_head.weight"\n'
        "    sharded = parallelize(build, plan, facts, mesh, dtype)",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="tied-weight-without-the-input-side",
        history="NVIDIA/Megatron-LM#656",
        file="parallel/tensor.py",
        old='weight=local_parameter(module, "weight")):\n            x = inner(',
        new='weight=local_parameter(module, "weight").detach()):\n            x = inner(',
        proof=parity("LL321T-fsdp=2-tp=2"),
    ),
)

TENSOR = (
    Fault(
        name="head-norm-gradients-not-summed",
        history="NVIDIA-NeMo/Automodel#3822",
        file="parallel/tensor.py",
        old="shards.partial_of(path, module, style.partial)",
        new="pass",
        proof=parity("G3-tp=2"),
    ),
    Fault(
        name="column-input-gradient-not-summed",
        history="NVIDIA/Megatron-LM#7452",
        file="parallel/tensor.py",
        old="copy_to_group(x, self.ranks)",
        new="x.view_as(x)",
        proof=parity("LL-tp=2"),
    ),
    Fault(
        name="column-input-gradient-summed-for-one",
        history="NVIDIA/Megatron-LM#7452",
        file="parallel/tensor.py",
        old="{_reader(model, path) for path, name in rules.items() if name == COLUMN}",
        new="[model.get_submodule(path) for path in rules if path.endswith("
        "('q_proj', 'gate_proj'))]",
        proof=parity("LL-tp=2"),
    ),
    Fault(
        name="sum-is-summed-again-in-backward",
        history="pytorch/pytorch#121587",
        file="parallel/collectives.py",
        old="return _SumOverGroup.apply(x, group)",
        new="from torch.distributed.nn.functional import all_reduce\n\n"
        "    return all_reduce(x.contiguous(), group=group)",
        proof=parity("LL-tp=2"),
    ),
    Fault(
        name="row-bias-added-on-every-rank",
        history="huggingface/text-generation-inference#1036",
        file="parallel/tensor.py",
        old="return y if bias is None else y + bias",
        new="return y if bias is None else y + bias * dist.get_world_size(region.ranks)",
        proof=parity("LLB-tp=2", slow=True),
    ),
    Fault(
        name="shards-of-two-axes-in-mesh-order",
        history="pytorch/torchtitan#1483",
        file="weights/load.py",
        old="sorted(cuts, key=lambda cut: is_strided_shard(cut[0]))",
        new="cuts",
        proof=parity("LL-fsdp=2-tp=2"),
    ),
    Fault(
        name="sliding-window-dropped",
        history="huggingface/accelerate#4177",
        file="models/build.py",
        old='    with torch.device("meta"):',
        new='    config.sliding_window = None\n    with torch.device("meta"):',
        proof=parity("MI_SW-tp=2", slow=True),
    ),
)
