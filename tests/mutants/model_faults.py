"""Faults of what a rank computes: the loss, the vocabulary's shards, the layers' shards."""

from __future__ import annotations

from tests.mutants.fault import RUN, TOKENS, Fault, parity

LOSS = (
    Fault(
        name="gradients-averaged-over-ranks",
        history="meta-pytorch/torchtune#2172",
        file="parallel/data.py",
        old="module.set_gradient_divide_factor(1.0)",
        new="module.set_gradient_divide_factor(float(layout.num_data_ranks))",
        proof=parity("ODD-fsdp2"),
    ),
    Fault(
        name="divided-by-local-tokens",
        history="PrimeIntellect-ai/prime-rl#1960",
        file="trainer/step.py",
        old="return int(mesh.sum_over(counted, mesh.data_axes).item())",
        new="return int(counted.item()) * mesh.layout.num_data_ranks",
        proof=parity("ODD-fsdp2"),
    ),
    Fault(
        name="mean-of-micro-batch-means",
        history="huggingface/transformers#34191",
        file="trainer/step.py",
        old="part = batch_loss_sum(model, batch, mesh) / max(1, total_targets)",
        new="part = batch_loss_sum(model, batch, mesh)\n"
        "        part = part / max(1, num_targets([batch]) * len(batches))",
        proof=TOKENS + "test_accumulation_and_ranks_with_uneven_token_counts",
    ),
    Fault(
        name="last-window-divided-as-a-full-one",
        history="huggingface/transformers#38837",
        file="trainer/step.py",
        old="max(1, total_targets)\n        part.backward()",
        new="max(1, total_targets)\n"
        "        num_rows = len(batches) * train.micro_batch * mesh.layout.num_data_ranks\n"
        "        part = part * (num_rows / train.global_batch)\n"
        "        part.backward()",
        proof=RUN + "[{'tp': 2}]",
    ),
    Fault(
        name="divided-again-by-accumulation",
        history="huggingface/accelerate#3533",
        file="trainer/step.py",
        old="part.backward()",
        new="(part / len(batches)).backward()",
        proof=parity("ODD-fsdp2"),
    ),
    Fault(
        name="reported-loss-times-tp",
        history="huggingface/transformers#39648",
        file="trainer/step.py",
        old="mesh.sum_over(loss, mesh.data_axes)\n    params",
        new='mesh.sum_over(loss, (*mesh.data_axes, "tp"))\n    params',
        proof=TOKENS + "test_tensor_parallel_does_not_multiply_the_loss",
    ),
    Fault(
        name="reported-loss-of-one-rank",
        history="huggingface/transformers#13681",
        file="trainer/step.py",
        old="mesh.sum_over(loss, mesh.data_axes)\n    params",
        new="loss = loss * mesh.layout.num_data_ranks\n    params",
        proof=parity("ODD-fsdp2"),
    ),
    Fault(
        name="tokens-counted-on-every-tp-rank",
        history="PrimeIntellect-ai/prime-rl#2562",
        file="trainer/step.py",
        old="sum_over(counted, mesh.data_axes)",
        new='sum_over(counted, (*mesh.data_axes, "tp"))',
        proof=parity("LL-tp2"),
    ),
    Fault(
        name="labels-not-shifted",
        history="macrocosm-os/pretraining#64",
        file="trainer/loss.py",
        old="labels[:, 1:], (0, 1)",
        new="labels, (0, 0)",
        proof=parity("ODD-fsdp2"),
    ),
    Fault(
        name="labels-shifted-twice",
        history="huggingface/transformers#46784",
        file="trainer/loss.py",
        old="labels[:, 1:], (0, 1)",
        new="labels[:, 2:], (0, 2)",
        proof=parity("ODD-fsdp2"),
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
        name="gradient-of-ignored-tokens",
        history="PaddlePaddle/Paddle#28622",
        file="trainer/loss.py",
        old="chunk.masked_fill_((labels[rows] == IGNORE)[:, None], 0.0)",
        new="pass",
        proof=parity("ODD-fsdp2"),
    ),
    Fault(
        name="loss-rounded-to-bf16",
        history="Modalities/modalities#464",
        file="trainer/loss.py",
        old="log_norms = sums.log() + maxima",
        new="log_norms = (sums.log() + maxima).to(logits.dtype).float()",
        proof="tests/unit/test_loss.py::test_bf16_logits_are_summed_in_fp32",
    ),
    Fault(
        name="evaluation-divided-by-local-tokens",
        history="Liquid4All/liquid-finetune#38",
        file="trainer/step.py",
        old="model.eval()\n    total_targets = _count(batches, mesh)",
        new="model.eval()\n    total_targets = num_targets(batches)",
        proof=TOKENS + "test_evaluation_counts_every_token_once",
    ),
)

VOCABULARY = (
    Fault(
        name="embedding-rows-of-others-not-masked",
        history="pytorch/pytorch#130725",
        file="parallel/tensor.py",
        old="x.masked_fill(elsewhere.unsqueeze(-1), 0)",
        new="x",
        proof=parity("LL-tp2"),
    ),
    Fault(
        name="padding-row-by-the-whole-numbering",
        history="pytorch/torchtitan#4637",
        file="parallel/tensor.py",
        old="padding - rows.start if padding is not None and padding in rows else None",
        new="padding if padding is not None and padding < len(rows) else None",
        proof=parity("LL-tp2"),
    ),
    Fault(
        name="vocabulary-padding-in-the-softmax",
        history="NVIDIA/Megatron-LM#1754",
        file="trainer/loss.py",
        old="flat = logits.flatten(0, 1)",
        new="flat = torch.nn.functional.pad(logits.flatten(0, 1), (0, -len(vocab) % 64))",
        proof=parity("LL321-tp2"),
    ),
    Fault(
        name="largest-logit-not-reduced",
        history="bigscience-workshop/Megatron-DeepSpeed#394",
        file="trainer/loss.py",
        old="dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)",
        new="pass",
        proof=parity("LL-tp2"),
    ),
    Fault(
        name="target-counted-on-every-rank",
        history="apple/ml-cross-entropy#42",
        file="trainer/loss.py",
        old="chunk.gather(1, ids[:, None])[:, 0].masked_fill(~here, 0.0)",
        new="chunk.gather(1, ids[:, None])[:, 0]",
        proof=parity("LL-tp2"),
    ),
    Fault(
        name="no-gradient-where-the-target-is-not",
        history="modelscope/ms-swift#9947",
        file="trainer/loss.py",
        old="chunk.scatter_add_(1, ids[:, None], -here.float()[:, None])",
        new="chunk.scatter_add_(1, ids[:, None], -here.float()[:, None]).mul_(here[:, None])",
        proof=parity("LL-tp2"),
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
        old="    parallelize(model, plan, mesh)\n"
        "    materialise(model, mesh.device)\n"
        "    load_weights(model, index)\n",
        new="    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())\n"
        "    parallelize(model, plan, mesh)\n"
        "    materialise(model, mesh.device)\n"
        "    for name, param in model.named_parameters():\n"
        '        key = "model.embed_tokens.weight" if name == "lm_head.weight" else name\n'
        "        with torch.no_grad():\n"
        "            read_into(local_part(param), local_box(param), index.pieces[key], key)\n",
        proof=parity("ODD-fsdp2"),
    ),
    Fault(
        name="tied-weight-without-the-input-side",
        history="NVIDIA/Megatron-LM#656",
        file="parallel/tensor.py",
        old='weight=_local(module, "weight")):\n            x = inner(',
        new='weight=_local(module, "weight").detach()):\n            x = inner(',
        proof=parity("LL321T-fsdp2xtp2"),
    ),
)

TENSOR = (
    Fault(
        name="head-norm-gradients-not-summed",
        history="NVIDIA/Megatron-LM#1446",
        file="parallel/tensor.py",
        old="weight=copy_to_group(weight.float(), group.ranks).to(weight.dtype)",
        new="weight=weight",
        proof=parity("Q3-fsdp2xtp2"),
    ),
    Fault(
        name="column-input-gradient-not-summed",
        history="NVIDIA/Megatron-LM#7452",
        file="parallel/tensor.py",
        old="copy_to_group(x, self.ranks)",
        new="x.view_as(x)",
        proof=parity("LL-tp2"),
    ),
    Fault(
        name="column-input-gradient-summed-for-one",
        history="NVIDIA/Megatron-LM#7452",
        file="parallel/tensor.py",
        old="for n in module._parameters}\n        with _using(module, **weights):\n"
        "            return inner(group.copy_input(x))",
        new="for n in module._parameters}\n        with _using(module, **weights):\n"
        "            first = group._shared is None or group._num_columns == 1\n"
        "            return inner(group.copy_input(x) if first else x)",
        proof=parity("LL-tp2"),
    ),
    Fault(
        name="sum-is-summed-again-in-backward",
        history="pytorch/pytorch#121587",
        file="parallel/collectives.py",
        old="return _SumOverGroup.apply(x, group)",
        new="from torch.distributed.nn.functional import all_reduce\n\n"
        "    return all_reduce(x.contiguous(), group=group)",
        proof=parity("LL-tp2"),
    ),
    Fault(
        name="row-bias-added-on-every-rank",
        history="huggingface/text-generation-inference#1036",
        file="parallel/tensor.py",
        old="return y if bias is None else y + bias",
        new="return y if bias is None else y + bias * dist.get_world_size(group.ranks)",
        proof=parity("LLB-tp2", slow=True),
    ),
    Fault(
        name="shards-of-two-axes-in-mesh-order",
        history="pytorch/torchtitan#1483",
        file="weights/load.py",
        old="sorted(cuts, key=lambda cut: is_strided_shard(cut[0]))",
        new="cuts",
        proof=parity("LL-fsdp2xtp2"),
    ),
    Fault(
        name="sliding-window-dropped",
        history="huggingface/accelerate#4177",
        file="models/build.py",
        old='    with torch.device("meta"):',
        new='    config.sliding_window = None\n    with torch.device("meta"):',
        proof=parity("MI_SW-fsdp2xtp2"),
    ),
)
