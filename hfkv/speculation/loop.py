"""The decoding loop: draft, verify in one forward, keep what the target would have chosen.

Rows of a batch accept different numbers of drafts, and the cache holds the same number of tokens for all. So after each
forward the cache is cropped to what all rows agree with, and a row that got further gives what it knows again. Nothing
in the cache is ever masked or moved: each row's positions, masks and stored tokens are those of plain decoding. The
batch is as fast as its slowest row, whose draft is never shortened by the others.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from .. import decoding
from .control import DraftLength
from .drafter import AssistantOptions, Block, Call, Draft, Drafter
from .sampling import Noise, accept_equal, accept_sampled
from .stats import Counts, attach
from .tree import Tree


class Speculation:
    """One call of `generate`.

    Parameters
    ----------
    name
        The assistant, for messages and statistics.
    drafter_class, options, resources
        What drafts.
    arguments
        What `generate` hands to a decoding method, by name.
    """

    def __init__(
        self, name: str, drafter_class: type[Drafter], options: AssistantOptions, resources: Any, arguments: Any
    ) -> None:
        self.model = arguments.pop("model")
        self.input_ids = arguments.pop("input_ids")
        self.processors = arguments.pop("logits_processor")
        self.criteria = arguments.pop("stopping_criteria")
        self.config = arguments.pop("generation_config")
        self.streamer = arguments.pop("streamer")
        self.kwargs = arguments
        self.name = name
        self.cache_argument = decoding.cache_argument(self.model)
        self.cache = decoding.check(self.model, self.config, self.kwargs, name)
        self.noise = Noise(self.input_ids.device)
        self.counts = Counts()
        call = Call(self.model, self.cache, bool(self.config.do_sample), self._process, self.noise, dict(self.kwargs))
        self.choose = call.choose
        self.drafter = drafter_class(call, options, resources)
        self.most = self.drafter.most
        self.length = DraftLength(self.most, options.num_assistant_tokens_schedule)
        # rows that have reached their end are padded, if anything but the length can end them
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        pad = self.config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad.flatten()[0])

    def run(self) -> Any:
        """Generate; what `generate` returns."""
        try:
            return self._run()
        finally:
            self.drafter.close()

    def _run(self) -> Any:
        batch, prompt = self.input_ids.shape[:2]
        self.ids = self.input_ids
        self.known = [prompt] * batch
        self.finished = [False] * batch
        outputs = self.model._prefill(
            self.input_ids, self.config, self.kwargs, is_first_iteration=not self.config.is_assistant
        )
        decoding.record_past(self.cache)
        self._grow(prompt + 1)
        self._accept(prompt - 1, outputs.logits[:, -1:], Draft([0] * batch))
        begin = time.perf_counter()
        done = self._commit(prompt, outputs)
        # the first token comes from the prompt's forward
        self.counts.tokens = 0
        while not done:
            done = self._round()
        seconds = time.perf_counter() - begin
        if self.streamer is not None:
            self.streamer.end()
        decoding.forget_past(self.cache)
        return self._result(seconds)

    def _round(self) -> bool:
        """One verification; whether it was the last."""
        cached = self.common - 1
        width = self._width(cached)
        begin = time.perf_counter()
        block = Block(self.ids, self.known, cached, width, self.kwargs)
        draft = self.drafter.propose(block) if width > 1 else Draft([0] * len(self.known))
        self._wait()
        drafted = time.perf_counter()
        behind = max((n for n, known in zip(draft.lengths, self.known, strict=True) if known == self.common), default=0)
        if draft.tree is None:
            # what all rows know already (the slowest has just ended) and the longest draft
            ends = [min(self._active()), *(k + n for k, n in zip(self.known, draft.lengths, strict=True) if n)]
            width = tried = min(width, max(ends) - cached)
            outputs = self.model(**self._inputs(cached, width), return_dict=True)
            self._accept(cached, outputs.logits[:, -width:], draft)
        else:
            tried = 1 + behind
            width, outputs = self._accept_tree(cached, draft.tree)
        done = self._commit(cached + 1, outputs, width)
        end = time.perf_counter()
        self.counts.forwards += 1
        self.counts.plain += tried == 1
        self.counts.draft_seconds += drafted - begin
        self.length.record(tried, behind, self.common - 1 - cached, drafted - begin, end - drafted)
        return done

    def _width(self, cached: int) -> int:
        """How many columns may be verified."""
        limits = [1 + self.length.choose(self.drafter.forecast(self.ids, self.known))]
        if self.criteria.max_length is not None:
            limits.append(self.criteria.max_length - self.common)
        ahead = decoding.steps_ahead(self.cache)
        if ahead is not None:
            limits.append(ahead)
        width = max(1, min(limits))
        self._grow(cached + width + 1)
        return width

    def _inputs(self, cached: int, width: int) -> dict[str, Any]:
        kwargs = self.kwargs if width == 1 else self._extended({}, width - 1)
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            self.ids[:, : cached + width], next_sequence_length=width, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        return inputs

    def _extended(self, outputs: Any, tokens: int) -> dict[str, Any]:
        """Masks and positions for so many further tokens."""
        result: dict[str, Any] = self.model._update_model_kwargs_for_generation(
            outputs, dict(self.kwargs), is_encoder_decoder=self.model.config.is_encoder_decoder, num_new_tokens=tokens
        )
        return result

    def _process(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.processors(ids, logits) if len(self.processors) else logits
        return scores

    def _accept(self, cached: int, logits: torch.Tensor, draft: Draft) -> None:
        """Write into ``ids`` what the target chooses, up to the first draft that it does not, and count."""
        ids, device, width = self.ids, self.ids.device, logits.shape[1]
        logits = logits.to(device=device, dtype=torch.float32, copy=True)
        # processors may work in place
        raw = logits.clone() if self.config.output_logits and len(self.processors) else logits
        scores = torch.stack([self._process(ids[:, : cached + 1 + i], logits[:, i]) for i in range(width)], dim=1)
        forced = torch.tensor([min(known - cached - 1, width - 1) for known in self.known], device=device)
        lengths = torch.tensor(draft.lengths, device=device)
        limit = (forced + lengths).clamp(max=width - 1)
        drafts = ids[:, cached + 1 : cached + width]
        if draft.probabilities is None:
            chosen = torch.stack([self.choose(scores[:, i], cached + 1 + i) for i in range(width)], dim=1)
            standing = accept_equal(drafts, chosen[:, :-1], forced, limit)
            final = chosen.gather(1, standing[:, None]).squeeze(1)
        else:
            standing, final = accept_sampled(
                drafts, scores, draft.probabilities[:, : width - 1].to(device), forced, limit
            )
        self._keep(cached, standing.tolist(), final, limit.tolist(), forced.tolist())
        self.shown = (scores, raw)

    def _keep(self, cached: int, standing: list[int], final: torch.Tensor, limit: list[int], forced: list[int]) -> None:
        places = []
        for row, (stands, most, before) in enumerate(zip(standing, limit, forced, strict=True)):
            known = cached + stands + 2
            places.append(known - 1)
            if self.finished[row] or known <= self.known[row]:
                # what is known already stays
                places[-1] = -1
                continue
            self.known[row] = known
            self.counts.drafted += most - before
            self.counts.accepted += stands - before
            self.counts.examined += min(stands + 1, most) - before
        rows = [row for row, place in enumerate(places) if place >= 0]
        self.ids[rows, [places[row] for row in rows]] = final[rows]

    def _accept_tree(self, cached: int, tree: Tree) -> tuple[int, Any]:
        """Verify a tree and leave the cache as if the path that stands had been given; its columns, and the outputs."""
        nodes = len(tree.tokens)
        self._grow(cached + nodes + 2)
        ids = self.ids
        ids[0, cached + 1 : cached + 1 + nodes] = ids.new_tensor(tree.tokens)
        inputs = self._inputs(cached, 1 + nodes)
        length = decoding.decoder_layers(self.cache)[0].get_seq_length()
        mask = self.kwargs.get("attention_mask")
        past = ids.new_ones(length) if mask is None else mask[0, :length]
        positions = inputs["position_ids"][:, :1] + ids.new_tensor(tree.depths())
        inputs |= decoding.tree_inputs(past, tree.sees(), positions, self.model.dtype)
        outputs = self.model(**inputs, return_dict=True)
        logits = outputs.logits[0, -1 - nodes :].to(device=ids.device, dtype=torch.float32, copy=True)
        known, shown = ids[:, : cached + 1], []

        def choose(place: int, path: list[int]) -> int:
            # processors may work in place
            raw = logits[place : place + 1].clone()
            scores = self._process(torch.cat([known, ids.new_tensor([path])], dim=1), raw.clone())
            shown.append((scores, raw))
            return int(self.choose(scores, cached + 1 + len(path)))

        standing, final = tree.walk(choose)
        places = [0, *(node + 1 for node in standing)]
        decoding.keep_places(self.cache, length, places)
        self.drafter.keep(places)
        ids[0, cached + 1 : cached + 1 + len(places)] = ids.new_tensor([*(tree.tokens[n] for n in standing), final])
        self.known[0] = cached + 1 + len(places)
        scores, raw = zip(*shown, strict=True)
        self.shown = torch.stack(scores, dim=1), torch.stack(raw, dim=1)
        self.counts.drafted += nodes
        self.counts.accepted += len(standing)
        self.counts.examined += len(standing) + (not tree.ends_at(standing))
        return len(places), outputs

    def _commit(self, start: int, outputs: Any, width: int = 1) -> bool:
        """Take what all rows know from column ``start`` on, crop the rest, and say whether all have finished."""
        stop = min(start + width, *self._active())
        done = False
        column = start
        while column < stop and not done:
            done = self._take(column, column - start)
            column += 1
        self.common = column
        self.cache.crop(-(width - (column - start)))
        self.noise.forget(column)
        self.kwargs = self._extended(outputs, column - start)
        self.counts.tokens += column - start
        if self.pads:
            self.known = [
                column + self.most + 1 if finished else known
                for known, finished in zip(self.known, self.finished, strict=True)
            ]
        return done

    def _active(self) -> list[int]:
        """How many tokens of each row are known, rows that are only padded left out."""
        return [known for known, ended in zip(self.known, self.finished, strict=True) if not (ended and self.pads)]

    def _take(self, column: int, place: int) -> bool:
        """One column is final: pad, stream, stop as plain decoding does; whether all rows have finished."""
        if self.pads and any(self.finished):
            self.ids[torch.tensor(self.finished, device=self.ids.device), column] = self.pad
        if self.streamer is not None:
            self.streamer.put(self.ids[:, column].cpu())
        for asked, held, shown in zip(
            (self.config.output_scores, self.config.output_logits),
            (self.counts.scores, self.counts.logits),
            self.shown,
            strict=True,
        ):
            if asked and self.config.return_dict_in_generate:
                held.append(shown[:, place].clone())
        scores = tuple(self.counts.scores) if self.counts.scores else None
        stopped = self.criteria(self.ids[:, : column + 1], scores).tolist()
        self.finished = [before or now for before, now in zip(self.finished, stopped, strict=True)]
        return all(self.finished)

    def _grow(self, columns: int) -> None:
        missing = columns - self.ids.shape[1]
        if missing > 0:
            # room for many rounds at once
            room = self.ids.new_full((self.ids.shape[0], max(missing, 256)), self.pad)
            self.ids = torch.cat([self.ids, room], dim=1)

    def _wait(self) -> None:
        """Let a device finish what it was given, so that drafting and verifying are told apart."""
        if self.ids.device.type == "cuda":
            torch.cuda.synchronize(self.ids.device)

    def _result(self, seconds: float) -> Any:
        counts = self.counts
        output = decoding.generate_output(
            self.model,
            self.config,
            sequences=self.ids[:, : self.common].clone(),
            scores=tuple(counts.scores),
            logits=tuple(counts.logits),
            cache=self.cache,
        )
        attach(output, counts.stats(self.name, self.length, seconds))
        return output
