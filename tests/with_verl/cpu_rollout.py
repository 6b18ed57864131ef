"""A rollout server on transformers' generate, for verl on a CPU. Apart from cpu.py: Ray imports it before verl."""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput


class Server:
    """Completes prompts in batches; logs what it loads."""

    def __init__(self, path: str, number: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.number, self.waiting, self.step, self.work, self.asked = number, [], 0, None, Counter()

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None, **_):
        answer = asyncio.get_event_loop().create_future()
        self.waiting.append((list(prompt_ids), dict(sampling_params), answer))
        if self.work is None or self.work.done():
            self.work = asyncio.ensure_future(self._serve())
        return await answer

    async def _serve(self) -> None:
        await asyncio.sleep(0.02)
        while self.waiting:
            asked, self.waiting = self.waiting[:64], self.waiting[64:]
            try:
                self._complete(asked)
            except Exception as error:
                for _, _, answer in asked:
                    if not answer.done():
                        answer.set_exception(error)

    def _complete(self, asked) -> None:
        limit = max(int(sampling.get("max_tokens") or 16) for _, sampling, _ in asked)
        temperature = float(asked[0][1].get("temperature", 1.0))
        width = max(len(prompt) for prompt, _, _ in asked)
        pad, end = self.model.config.pad_token_id or 0, self.model.config.eos_token_id
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt, _, _ in asked])
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _, _ in asked])
        noise = [self._noise(prompt) for prompt, _, _ in asked]

        def perturbed(_, scores):
            """The likeliest of these is a sample of the policy's: what is drawn does not depend on who asked first."""
            uniform = torch.stack([torch.rand(scores.shape[1], generator=generator) for generator in noise])
            return scores / (temperature or 1.0) - (-uniform.clamp(1e-9, 1 - 1e-7).log()).log() * bool(temperature)

        with torch.no_grad():
            out = self.model.generate(
                input_ids=ids, attention_mask=seen, max_new_tokens=limit, do_sample=False,
                logits_processor=[perturbed], return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        new = out.sequences[:, width:]
        logits = torch.stack(out.logits, 1) / (temperature or 1.0)
        logprobs = logits.log_softmax(-1).gather(-1, new[..., None])[..., 0]
        for row, (_, _, answer) in enumerate(asked):
            tokens, reason = new[row].tolist(), "length"
            if end in tokens:
                tokens, reason = tokens[: tokens.index(end) + 1], "completed"
            values = logprobs[row, : len(tokens)].tolist()
            about = {"global_steps": self.step}
            answer.set_result(TokenOutput(token_ids=tokens, log_probs=values, stop_reason=reason, extra_fields=about))

    def _noise(self, prompt) -> torch.Generator:
        self.asked[tuple(prompt)] += 1
        return torch.Generator().manual_seed(hash((*prompt, self.asked[tuple(prompt)], self.step, self.number)) % 2**31)

    async def load(self, weights, step=None) -> None:
        self.model.load_state_dict(weights, strict=False)
        self.step = step or 0
        self.asked.clear()

    async def _nothing(self, *_, **__) -> None:
        pass

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = _nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


class Replica(RolloutReplica):
    async def launch_servers(self):
        options = {"num_cpus": 0.1, "name": f"cpu_server_{self.replica_rank}", "max_concurrency": 256}
        self._server_handle = ray.remote(Server).options(**options).remote(self.model_config.path, self.replica_rank)
        self.servers, self._server_address = [self._server_handle], options["name"]


class Adapter(BaseRollout):
    def __init__(self, config, model_config, device_mesh, replica_rank=-1):
        super().__init__(config, model_config, device_mesh)
        self._number, self._rank = divmod(int(os.environ.get("RANK", "0")), config.tensor_model_parallel_size)
        self._server = None

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, wire_format="named_tensors", global_steps=None, **_):
        whole = ((n, t.full_tensor() if hasattr(t, "full_tensor") else t) for n, t in weights)
        state = {name: tensor.detach().clone() for name, tensor in whole}
        self._server = self._server or ray.get_actor(f"cpu_server_{self._number}")
        if self._rank == 0:
            await self._server.load.remote(state, global_steps)
