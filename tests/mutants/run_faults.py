"""Faults of what happens to gradients, and of a run: norm, reduction, optimizer, rows, resume."""

from __future__ import annotations

from tests.mutants.fault import ONES, RESUME, RUN, TOKENS, Fault, parity

NORM = (
    Fault(
        name="norm-counted-on-every-tp-rank",
        history="pytorch/pytorch#88955",
        file="parallel/grads.py",
        old="mesh.sum_over(squares[axes], axes)",
        new='mesh.sum_over(squares[axes], dict.fromkeys((*axes, "tp")))',
        proof=ONES + "[tp2]",
    ),
    Fault(
        name="norm-of-the-local-shards",
        history="pytorch/torchtitan#766",
        file="parallel/grads.py",
        old="mesh.sum_over(squares[axes], axes)",
        new='mesh.sum_over(squares[axes], [axis for axis in axes if axis != "fsdp"])',
        proof=ONES + "[fsdp2]",
    ),
    Fault(
        name="norm-of-replicas-added",
        history="ByteDance-Seed/VeOmni#184",
        file="parallel/grads.py",
        old="mesh.sum_over(squares[axes], axes)",
        new='mesh.sum_over(squares[axes], dict.fromkeys((*axes, "dp")))',
        proof=ONES + "[dp2xfsdp2]",
    ),
    Fault(
        name="norm-with-the-tied-weight-twice",
        history="NVIDIA/Megatron-LM#7227",
        file="trainer/step.py",
        old="counted = [param for _, param in sharded.named_parameters(copies=False)]",
        new="modules = [module for part in sharded.parts for module in part.model.modules()]\n"
        "    counted = [param for module in modules for param in module.parameters(recurse=False)]",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="norm-summed-one-value-after-the-other",
        history="pytorch/pytorch#169237",
        file="parallel/grads.py",
        old="square = _sum_of_squares(local_part(param.grad))",
        new="square = local_part(param.grad).norm().square()",
        proof="tests/unit/test_grads.py::test_the_norm_of_a_long_gradient_is_exact",
    ),
    Fault(
        name="norm-of-the-last-piece",
        history="pytorch/pytorch#15602",
        file="parallel/grads.py",
        old="    if whole:\n",
        new="    if whole == len(flat):\n",
        proof="tests/unit/test_grads.py::test_the_norm_of_a_long_gradient_is_exact",
    ),
    Fault(
        name="clipped-by-the-local-norm",
        history="pytorch/pytorch#170862",
        file="parallel/grads.py",
        old="    scale = (max_norm / (norm + 1e-6))",
        new="    params = [param for param in params if param.grad is not None]\n"
        "    norm = torch.stack([local_part(param.grad).norm() for param in params]).norm()\n"
        "    scale = (max_norm / (norm + 1e-6))",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="small-gradients-scaled-up",
        history="pytorch/pytorch#73405",
        file="parallel/grads.py",
        old="(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        new="max_norm / (norm + 1e-6)",
        proof=ONES + "[fsdp2]",
    ),
)

STEP = (
    Fault(
        name="replicas-do-not-meet",
        history="NVIDIA-NeMo/Automodel#3135",
        file="parallel/data.py",
        old='replicas = ("dp",) if layout.dp > 1 else ()',
        new="replicas = ()",
        proof=parity("LL-dp=2"),
    ),
    Fault(
        name="last-micro-batch-not-reduced",
        history="deepspeedai/DeepSpeed#7985",
        file="parallel/data.py",
        old="root.set_requires_gradient_sync(is_last and",
        new="root.set_requires_gradient_sync(not is_last and",
        proof=parity("ODD-fsdp=2-zero=1"),
    ),
    Fault(
        name="only-the-last-micro-batch-kept",
        history="NVIDIA/Megatron-LM#7186",
        file="trainer/step.py",
        old="one.backward()",
        new="part.model.zero_grad()\n            one.backward()",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="gradients-of-the-step-before-kept",
        history="meta-pytorch/torchforge#71",
        file="trainer/step.py",
        old="    optimizer.zero_grad()\n",
        new="",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="gradients-reduced-in-bf16",
        history="pytorch/pytorch#106395",
        file="parallel/data.py",
        old="DTYPES[plan.precision.reduce]",
        new="DTYPES[plan.precision.compute]",
        proof="tests/ranks/test_parity.py::test_bf16_gradients_are_reduced_in_fp32[fsdp2]",
    ),
    Fault(
        name="weights-kept-in-bf16",
        history="meta-pytorch/torchtune#2254",
        file="trainer/loop.py",
        old="mesh, torch.float32, loading=loading)",
        new='mesh, {"bf16": torch.bfloat16, "fp32": torch.float32}[plan.precision.compute])',
        proof="tests/ranks/test_loop.py::test_a_run_with_bf16_compute_keeps_fp32_weights",
    ),
    Fault(
        name="norms-and-biases-decay",
        history="huggingface/transformers#35927",
        file="trainer/optim.py",
        old='"weight_decay": 0.0}',
        new='"weight_decay": train.weight_decay}',
        proof="tests/unit/test_optim.py::test_matrices_decay_and_vectors_do_not",
    ),
    Fault(
        name="rate-of-the-first-group-only",
        history="deepspeedai/DeepSpeed#7969",
        file="trainer/step.py",
        old="for group in optimizer.param_groups:",
        new="for group in optimizer.param_groups[:1]:",
        proof=RUN + "[{'tp': 2}]",
    ),
    Fault(
        name="schedule-times-world-size",
        history="huggingface/accelerate#2926",
        file="trainer/loop.py",
        old="rate = learning_rate_at(step, run.num_steps, train)",
        new="rate = learning_rate_at(\n"
        "        step * run.plan.layout.num_data_ranks, run.num_steps, train\n"
        "    )",
        proof=RUN + "[{'fsdp': 2}]",
    ),
    Fault(
        name="schedule-by-micro-batches",
        history="huggingface/accelerate#662",
        file="trainer/loop.py",
        old="rate = learning_rate_at(step, run.num_steps, train)",
        new="rate = learning_rate_at(\n"
        "        step * train.num_micro_batches(run.plan.layout), run.num_steps, train\n"
        "    )",
        proof=RUN + "[{'tp': 2}]",
    ),
)

ROWS = (
    Fault(
        name="data-ranks-read-the-same-rows",
        history="stanford-crfm/mistral#194",
        file="trainer/data/batches.py",
        old="sequences[data_rank::num_data_ranks]",
        new="sequences[::num_data_ranks]",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="replicas-read-the-same-rows",
        history="FlagOpen/FlagEmbedding#80",
        file="parallel/mesh.py",
        old='self.rank("dp") * self.layout.fsdp + self.rank("fsdp")',
        new='self.rank("fsdp")',
        proof=parity("LL-dp=2"),
    ),
    Fault(
        name="every-rank-shuffles-its-own-way",
        history="NVlabs/LongLive#71",
        file="trainer/loop.py",
        old="Order(lengths=rows.lengths, train=plan.train)",
        new="Order(\n"
        "            lengths=rows.lengths,\n"
        '            train=plan.train.model_copy(update={"seed": mesh.data_rank}),\n'
        "        )",
        proof=RUN + "[{'fsdp': 2}]",
    ),
    Fault(
        name="padding-is-trained",
        history="axolotl-ai-cloud/axolotl#2227",
        file="trainer/data/batches.py",
        old="torch.full_like(ids, IGNORE)",
        new="torch.zeros_like(ids)",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="padding-id-is-never-trained",
        history="huggingface/transformers#23530",
        file="trainer/data/batches.py",
        old="return ids, labels, real, positions",
        new="return ids, labels.masked_fill(ids == 0, IGNORE), real, positions",
        proof=parity("ODD-fsdp=2"),
    ),
    Fault(
        name="every-epoch-in-one-order",
        history="pytorch/pytorch#31771",
        file="trainer/data/order.py",
        old="default_rng([self.train.seed, epoch])",
        new="default_rng([self.train.seed])",
        proof="tests/unit/test_data.py::"
        "test_every_row_comes_once_an_epoch_in_an_order_that_the_seed_decides[10]",
    ),
    Fault(
        name="short-step-filled-up-with-rows-again",
        history="huggingface/accelerate#125",
        file="trainer/data/batches.py",
        old="mine = list(sequences[data_rank::num_data_ranks])",
        new="even = [*sequences, *sequences[: -len(sequences) % num_data_ranks]]\n"
        "    mine = even[data_rank::num_data_ranks]",
        proof=TOKENS + "test_ranks_run_out_of_rows_together[2]",
    ),
)

CONTINUED = (
    Fault(
        name="moments-not-restored",
        history="KempnerInstitute/KempnerForge#114",
        file="trainer/checkpoint.py",
        old="read_into(local_part(state[moment]), box, pieces, key, loading)",
        new="pass",
        proof=RESUME + "[fsdp2-fsdp2]",
    ),
    Fault(
        name="step-of-the-moments-not-restored",
        history="deepspeedai/DeepSpeed#564",
        file="trainer/checkpoint.py",
        old="torch.tensor(float(step), device",
        new="torch.tensor(0.0, device",
        proof=RESUME + "[fsdp2-fsdp2]",
    ),
    Fault(
        name="rows-from-the-start-after-a-resume",
        history="huggingface/accelerate#2016",
        file="trainer/loop.py",
        old="run.order.of_step(step)",
        new="run.order.of_step(step - run.start)",
        proof=RUN + "[{'fsdp': 2}]",
    ),
    Fault(
        name="schedule-from-the-start-after-a-resume",
        history="lightly-ai/lightly-train#301",
        file="trainer/loop.py",
        old="rate = learning_rate_at(step, run.num_steps, train)",
        new="rate = learning_rate_at(step - run.start, run.num_steps, train)",
        proof=RUN + "[{'fsdp': 2}]",
    ),
)
