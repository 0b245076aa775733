"""Faults of one way to split: sequence, shared KV heads, pipeline, context; the replica check."""

from __future__ import annotations

from tests.mutants.fault import EVALUATION, ONES, RESUME, RUN, Fault, parity

_SEQUENCE = parity("LL-tp=2-sequence_parallel=True")
_PIPELINE = parity("Q3-pp=2")
_CONTEXT = parity("G3-cp=2")
_DRIFT = "tests/ranks/test_replicas.py::test_a_replica_that_has_drifted_stops_the_run"

SEQUENCE = (
    Fault(
        name="gradients-of-split-norms-not-summed",
        history="NVIDIA/Megatron-LM#1446",
        file="parallel/tensor.py",
        old="if not isinstance(param, DTensor):",
        new='if not isinstance(param, DTensor) and "norm" not in param_name:',
        proof=_SEQUENCE,
    ),
    Fault(
        name="gradient-of-the-row-bias-not-summed",
        history="NVIDIA/Megatron-LM#236",
        file="parallel/tensor.py",
        old="if not isinstance(param, DTensor):",
        new='if not isinstance(param, DTensor) and not param_name.endswith("bias"):',
        proof=parity("LLB-tp=2-sequence_parallel=True", slow=True),
    ),
    Fault(
        name="odd-tail-cut-off",
        history="pytorch/torchtitan#1306",
        file="trainer/data/batches.py",
        old="parts = (ids, shift_labels(labels), real,",
        new="used = int(real.sum(1).max()) // multiple * multiple\n"
        "        labels[:, used:] = IGNORE\n"
        "        parts = (ids, shift_labels(labels), real,",
        proof=_SEQUENCE,
    ),
    Fault(
        name="padding-to-the-multiple-is-trained",
        history="pytorch/torchtitan#1306",
        file="trainer/data/batches.py",
        old="labels = torch.full_like(ids, IGNORE)",
        new="labels = torch.full_like(ids, IGNORE)\n"
        "    labels[:, max(sum(len(rows[n][0]) for n in row) for row in sequences) :] = 0",
        proof=_SEQUENCE,
    ),
    Fault(
        name="scattered-without-the-sum",
        history="sgl-project/sglang#14811",
        file="parallel/collectives.py",
        old="return _reduce_scatter(x, group)",
        new="return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()",
        proof=_SEQUENCE,
    ),
    Fault(
        name="gathered-sequence-gives-back-its-slice",
        history="pytorch/xla#5784",
        file="parallel/collectives.py",
        old="return _reduce_scatter(grad, ctx.group), None",
        new="parts = grad.chunk(dist.get_world_size(ctx.group), 1)\n"
        "        return parts[dist.get_rank(ctx.group)].contiguous(), None",
        proof=_SEQUENCE,
    ),
    Fault(
        name="split-gives-back-its-own-part",
        history="AlibabaPAI/torchacc#26",
        file="parallel/collectives.py",
        old="* length, length).contiguous()\n\n"
        "    @staticmethod\n"
        "    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:\n"
        "        return _gather(grad, ctx.group), None",
        new="* length, length).contiguous()\n\n"
        "    @staticmethod\n"
        "    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:\n"
        "        parts = [torch.zeros_like(grad)] * dist.get_world_size(ctx.group)\n"
        "        parts[dist.get_rank(ctx.group)] = grad\n"
        "        return torch.cat(parts, 1), None",
        proof=_SEQUENCE,
    ),
)

KV_HEADS = (
    Fault(
        name="gradient-of-a-shared-kv-head-not-summed",
        history="bigcode-project/Megatron-LM#37",
        file="parallel/tensor.py",
        old='self.partial[f"{path}.{name}"] = KV_REPLICAS',
        new="pass",
        proof=parity("LL1-tp=2"),
    ),
    Fault(
        name="neighbours-get-different-kv-heads",
        history="FlashML-org/FreeToken#177",
        file="parallel/tensor.py",
        old="[Shard(0), Replicate()]",
        new="[Replicate(), Shard(0)]",
        proof=parity("LLB-tp=4-sequence_parallel=True"),
    ),
    Fault(
        name="norm-with-a-shared-kv-head-twice",
        history="NVIDIA-NeMo/RL#3788",
        file="parallel/grads.py",
        old="mesh.sum_over(squares[axes], axes)",
        new='mesh.sum_over(squares[axes], ["tp" if axis == KV_HEADS else axis for axis in axes])',
        proof=parity("LL1-tp=2"),
    ),
)

PIPELINE = (
    Fault(
        name="divided-by-the-pipelines-micro-batches",
        history="pytorch/torchtitan#1733",
        file="parallel/pipeline.py",
        old="scale_grads=False",
        new="scale_grads=True",
        proof=_PIPELINE,
    ),
    Fault(
        name="pipelines-gradients-not-divided",
        history="pytorch/torchtitan#2972",
        file="trainer/step.py",
        old="return head_loss(output, _head(last.model), targets, mesh, twice=twice) / total",
        new="loss = head_loss(output, _head(last.model), targets, mesh, twice=twice)\n"
        "            return loss + (loss / total - loss).detach()",
        proof=_PIPELINE,
    ),
    Fault(
        name="tied-copies-gradient-not-summed",
        history="uw-syfi/piper#13",
        file="parallel/sharded.py",
        old="sum_in_one(grads, partial(dist.all_reduce, group=group))",
        new="pass",
        proof=_PIPELINE,
    ),
    Fault(
        name="tied-copies-on-one-rank-not-summed",
        history="uw-syfi/piper#13",
        file="parallel/sharded.py",
        old="            grads[0] += grads[1]\n            grads[1].copy_(grads[0])",
        new="            pass",
        proof=parity("LL321T-pp=2-pipeline_schedule=zbv"),
    ),
    Fault(
        name="norm-with-the-tied-copy-twice",
        history="NVIDIA/Megatron-LM#7227",
        file="trainer/step.py",
        old="sharded.named_parameters(copies=False)",
        new="sharded.named_parameters()",
        proof=_PIPELINE,
    ),
    Fault(
        name="norm-of-the-own-stage",
        history="pytorch/torchtitan#596",
        file="parallel/grads.py",
        old='return mesh.sum_over(total, ["pp"]).sqrt()',
        new="return total.sqrt()",
        proof=ONES + "[pp2]",
    ),
    Fault(
        name="uneven-cut-loses-a-layer",
        history="ml-explore/mlx-lm#1688",
        file="planner/stages.py",
        old="num_stages=count, layers=layers, rank",
        new="num_stages=count, layers=layers[: facts.num_layers // count], rank",
        proof=parity("ODD-pp=2", slow=True),
    ),
    Fault(
        name="stage-repeats-the-layer-before-it",
        history="NVIDIA/Megatron-LM#1304",
        file="planner/stages.py",
        old="tuple(range(begin, end) for begin, end in pairwise(ends))",
        new="tuple(range(max(0, begin - 1), end) for begin, end in pairwise(ends))",
        proof=_PIPELINE,
    ),
    Fault(
        name="stage-has-the-positions-of-its-shard",
        history="NVIDIA-NeMo/Automodel#652",
        file="parallel/pipeline.py",
        old="return body(inputs_embeds=carrier, **options)",
        new="own = torch.arange(tokens, device=x.device).repeat(self._sequence_parts)[None]\n"
        "            return body(inputs_embeds=carrier, position_ids=own, use_cache=False)",
        proof=parity("Q3-pp=2-tp=2-sequence_parallel=True"),
    ),
    Fault(
        name="loss-reported-by-the-last-stage-only",
        history="pytorch/torchtitan#547",
        file="trainer/step.py",
        old='mesh.sum_over(run(ids, inputs, targets, loss_function, len(batches)), ["pp"])',
        new="run(ids, inputs, targets, loss_function, len(batches))",
        proof=_PIPELINE,
    ),
    Fault(
        name="loss-of-the-last-micro-batch-only",
        history="deepspeedai/DeepSpeed#3900",
        file="parallel/pipeline.py",
        old="loss.detach() for loss in losses",
        new="loss.detach() for loss in losses[-1:]",
        proof=_PIPELINE,
    ),
    Fault(
        name="evaluation-of-the-first-round-only",
        history="deepspeedai/DeepSpeed#6484",
        file="trainer/step.py",
        old="for begin in range(0, len(batches), at_once):",
        new="for begin in range(0, min(len(batches), at_once), at_once):",
        proof=EVALUATION + "[{'pp': 2}]",
    ),
    Fault(
        name="padding-to-one-shape-is-trained",
        history="NVIDIA-NeMo/Automodel#1689",
        file="trainer/data/batches.py",
        old="labels = torch.full_like(ids, IGNORE)",
        new="labels = torch.full_like(ids, IGNORE)\n"
        "    labels[:, _shape(rows, sequences, 1)[1] :] = 0",
        proof=_PIPELINE,
    ),
    Fault(
        name="tied-copy-not-loaded",
        history="sgl-project/sglang#15890",
        file="weights/load.py",
        old="    with torch.no_grad():\n        for name, param in sharded.stored_names():\n",
        new="    with torch.no_grad():\n        for name, param in sharded.named_parameters():\n"
        "            if name not in index.pieces:\n"
        "                torch.nn.init.normal_(local_part(param), std=0.02)\n"
        "                continue\n",
        proof=_PIPELINE,
    ),
    Fault(
        name="moments-of-the-tied-copy-not-restored",
        history="NVIDIA-NeMo/Automodel#2511",
        file="trainer/checkpoint.py",
        old="for name, param in sharded.stored_names():",
        new="for name, param in sharded.named_parameters(copies=False):",
        proof=RESUME + "[pp2-pp2]",
    ),
)

CONTEXT = (
    Fault(
        name="labels-shifted-after-the-cut",
        history="NVIDIA-BioNeMo/bionemo-recipes#1449",
        file="trainer/data/batches.py",
        old="parts = (ids, shift_labels(labels), real,",
        new="labels = torch.cat([shift_labels(x) for x in labels.chunk(4, dim=1)], dim=1)\n"
        "        parts = (ids, labels, real,",
        proof=_CONTEXT,
    ),
    Fault(
        name="positions-begin-again-on-each-rank",
        history="NVIDIA/Megatron-LM#560",
        file="parallel/context.py",
        old="torch.cat([steps + start for start in starts])",
        new="torch.arange(num_tokens, device=device)",
        proof=_CONTEXT,
    ),
    Fault(
        name="sliding-window-dropped-by-context",
        history="huggingface/accelerate#4177",
        file="parallel/context.py",
        old="    context: Context = module.shardwise_context\n",
        new="    context: Context = module.shardwise_context\n    sliding_window = None\n",
        proof=_CONTEXT,
    ),
    Fault(
        name="sliding-window-one-key-too-wide",
        history="huggingface/transformers#39408",
        file="models/attention.py",
        old="ahead <= -window",
        new="ahead < -window",
        proof=_CONTEXT,
    ),
    Fault(
        name="rows-of-a-run-not-cut",
        history="huggingface/transformers#48167",
        file="trainer/loop.py",
        old="        columns=own_columns(run.mesh),\n",
        new="",
        proof=RUN + "[{'cp': 2}]",
    ),
    Fault(
        name="keys-in-the-order-of-ranks",
        history="NVIDIA/Model-Optimizer#1804",
        file="parallel/context.py",
        old="return torch.cat((front.flatten(0, 1), back.flip(0).flatten(0, 1))).movedim(0, 2)",
        new="return whole.movedim(0, 2)",
        proof=_CONTEXT,
    ),
    Fault(
        name="gradients-of-keys-not-summed",
        history="ByteDance-Seed/VeOmni#681",
        file="parallel/context.py",
        old="dist.reduce_scatter_tensor(part, whole, group=context.group)",
        new="part.copy_(whole.chunk(context.num_ranks)[context.rank])",
        proof=_CONTEXT,
    ),
    Fault(
        name="gradients-averaged-over-context",
        history="NVIDIA/Megatron-LM#906",
        file="parallel/data.py",
        old="module.set_gradient_divide_factor(1.0)",
        new="module.set_gradient_divide_factor(float(layout.cp))",
        proof=_CONTEXT,
    ),
)

REPLICAS = (
    Fault(
        name="drift-compared-with-itself",
        history="verl-project/verl#6666",
        file="parallel/replicas.py",
        old="    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)\n"
        "    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)\n",
        new="",
        proof=_DRIFT + "[dp2]",
    ),
    Fault(
        name="drift-of-tensor-parallel-copies-unseen",
        history="NVIDIA-NeMo/Automodel#3822",
        file="parallel/replicas.py",
        old='for axis in ("dp", "tp", KV_REPLICAS):',
        new='for axis in ("dp", KV_REPLICAS):',
        proof=_DRIFT + "[tp2]",
    ),
    Fault(
        name="drift-of-the-tied-copy-unseen",
        history="NVIDIA-NeMo/Megatron-Bridge#5380",
        file="parallel/replicas.py",
        old="    if sharded.pipeline is not None and sharded.tied:\n",
        new="    if sharded.pipeline is None and sharded.tied:\n",
        proof=_DRIFT + "[pp2]",
    ),
)

_SUMS = "tests/ranks/test_shards.py::test_sums_are_added_in_fp32_in_the_order_of_the_ranks"
_IN_BF16 = "tests/ranks/test_traffic.py::test_ledger_in_bf16"

SHARDS = (
    Fault(
        name="one-ranks-gradients-not-in-the-sum",
        history="meta-pytorch/torchcomms#477",
        file="parallel/shards.py",
        old="for part in parts[1:]:",
        new="for part in parts[1:-1] or parts[1:]:",
        proof=f"{_SUMS}[3-65543]",
    ),
    Fault(
        name="sum-in-the-dtype-that-is-sent",
        history="pytorch/pytorch#106395",
        file="parallel/shards.py",
        old="total += term[: len(total)].copy_(part[piece])",
        new="total.copy_(total.to(part.dtype) + part[piece])",
        proof=f"{_SUMS}[2-65543]",
    ),
    Fault(
        name="accumulated-gradients-sent-in-bf16",
        history="deepspeedai/DeepSpeed#1800",
        file="parallel/data.py",
        old="part.sums.of_one_pass = is_first or not layout.reduces_once",
        new="part.sums.of_one_pass = True",
        proof=f"{_IN_BF16}[zero1 twice]",
    ),
    Fault(
        name="gradients-of-replicas-not-summed",
        history="kohya-ss/sd-scripts#924",
        file="parallel/data.py",
        old='if mesh.size("dp") > 1:',
        new='if mesh.size("dp") > 2:',
        proof=parity("LL-dp=2"),
    ),
)
