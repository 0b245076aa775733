"""Faults of packed rows: rows that see each other, lost positions, trained first tokens."""

from __future__ import annotations

from tests.mutants.fault import Fault

_TESTS = "tests/ranks/test_packing.py::"
_ALONE = _TESTS + "test_no_document_sees_another"
_DATA = "tests/unit/test_data.py::"


def _packed(case: str) -> str:
    return f"{_TESTS}test_packed_rows_equal_rows_alone[{case}]"


PACKING = (
    Fault(
        name="packed-rows-see-each-other",
        history="huggingface/transformers#46634",
        file="parallel/context.py",
        old="row=column - positions[begin],",
        new="row=0,",
        proof=_ALONE + "[LL-{'fsdp': 1}]",
    ),
    Fault(
        name="packed-rows-see-each-other-under-cp",
        history="axolotl-ai-cloud/axolotl#3608",
        file="parallel/context.py",
        old="row=column - positions[begin],",
        new="row=column - positions[begin] if column == begin else 0,",
        proof=_ALONE + "[G3-{'cp': 2}]",
    ),
    Fault(
        name="packed-row-forgets-what-others-have",
        history="huggingface/trl#6843",
        file="parallel/context.py",
        old="row=column - positions[begin],",
        new="row=column,",
        proof=_packed("G3-cp=2"),
    ),
    Fault(
        name="mask-of-packed-rows-dropped-under-cp",
        history="huggingface/trl#6843",
        file="parallel/context.py",
        old="context.mask(piece.start - begin,",
        new="None if context.packed else context.mask(piece.start - begin,",
        proof=_packed("G3-cp=2"),
    ),
    Fault(
        name="pieces-of-the-micro-batch-before",
        history="KempnerInstitute/KempnerForge#204",
        file="parallel/context.py",
        old="if positions is not self._of:",
        new="if self._of is None or positions.shape != self._of.shape:",
        proof=_packed("Q3-pp=2"),
    ),
    Fault(
        name="positions-go-on-in-the-next-row",
        history="huggingface/nanoVLM#201",
        file="trainer/data/batches.py",
        old="positions[i, span] = torch.arange(len(tokens))",
        new="positions[i, span] = torch.arange(begin, span.stop)",
        proof=_packed("LL-fsdp=2"),
    ),
    Fault(
        name="later-stages-get-no-positions",
        history="KempnerInstitute/KempnerForge#204",
        file="parallel/pipeline.py",
        old='options = {"position_ids": position_ids,',
        new="if self._received is not None and position_ids is not None:\n"
        "            position_ids = torch.arange(position_ids.shape[1]).expand_as(position_ids)\n"
        '        options = {"position_ids": position_ids,',
        proof=_packed("Q3-pp=2"),
    ),
    Fault(
        name="evaluation-in-a-pipeline-without-positions",
        history="KempnerInstitute/KempnerForge#204",
        file="parallel/pipeline.py",
        old="hidden = module(hidden, **options)",
        new="whole = torch.arange(batch_ids.shape[1]).expand_as(batch_ids)\n"
        "                hidden = module(hidden, position_ids=whole)",
        proof=_TESTS + "test_evaluation_of_packed_rows[{'pp': 2}]",
    ),
    Fault(
        name="first-token-predicted-from-the-row-before",
        history="pytorch/torchtitan#4075",
        file="trainer/data/batches.py",
        old="labels[i, begin] = IGNORE  # nothing of its own row comes before it",
        new="pass",
        proof=_packed("LL-fsdp=2"),
    ),
    Fault(
        name="balance-of-the-whole-sequence",
        history="pytorch/torchtitan#2061",
        file="parallel/routing.py",
        old="numbers * length + columns - positions",
        new="(numbers * length).expand_as(real)",
        proof=_packed("MOE-cp=2"),
    ),
    Fault(
        name="sequences-packed-too-full",
        history="meta-pytorch/torchtune#1689",
        file="trainer/data/order.py",
        old="current[place], room[place] = packed[-1], seq_len",
        new="current[place], room[place] = packed[-1], seq_len + 3",
        proof=_DATA + "test_packing_puts_each_row_whole_into_one_sequence[3000]",
    ),
    Fault(
        name="all-epochs-as-long-as-the-first",
        history="verl-project/verl#7401",
        file="trainer/data/order.py",
        old="epoch = bisect_right(self._ends, step)",
        new="epoch = min(step // self._ends[0], len(self._ends) - 1)",
        proof=_DATA + "test_packed_epochs_come_one_after_the_other_whatever_their_lengths",
    ),
)
