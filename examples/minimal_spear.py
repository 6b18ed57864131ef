"""SPEAR in one file: read it from top to bottom. Needs torch and spear_rl's core; runs on one CPU core in seconds.

    python examples/minimal_spear.py [--seed 1]     # SPEAR
    python examples/minimal_spear.py --base         # its base algorithm: no tool bonus, no self-imitation

A toy agent faces a safe with a code of two digits. Two tools show one digit each; there is a reward of about 1 if both
digits are then said in order, a little more if that took fewer turns. Untrained, it opens one safe in a hundred, by
guessing, and a look at a digit does not pay yet. The policy is a small network that reads what the episode has shown so
far; each turn it writes one token.

SPEAR adds two curricula to a base algorithm (here GRPO without division by the standard deviation, "Dr. GRPO"):
  learn the ropes:  a bonus per tool call, whose weight mu(t) fades from 1 to 0
  trust the wins:   episodes that went well are replayed; the weight gamma(t) of their loss grows from 0 to 0.5
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from spear_rl.algorithms import tool_bonus
from spear_rl.functional import LossInputs, clipped_surrogate, cosine, group_relative, keep_low_covariance, recalibrate
from spear_rl.replay import ReplayBuffer, RewardHistory

DIGITS = 10
LOOK_LEFT, LOOK_RIGHT = DIGITS, DIGITS + 1  # the two tools; the tokens 0..9 say a digit
NUM_TOKENS = DIGITS + 2
MAX_TURNS = 6
UNKNOWN = DIGITS  # what the policy sees in place of a digit that no tool has shown yet

NUM_TASKS, GROUP_SIZE = 16, 8  # per step: 16 tasks, 8 episodes of each
LEARNING_RATE = 3e-3


# -- 1. The environment: one episode --------------------------------------------------------------------------------


@dataclass
class Safe:
    """State: the digits shown so far and how many have been said. A wrong digit ends the episode."""

    code: tuple[int, int]
    seen: list[int] = field(default_factory=lambda: [UNKNOWN, UNKNOWN])
    num_said: int = 0
    num_turns: int = 0

    def observation(self) -> list[int]:
        return [*self.seen, self.num_said]

    def step(self, token: int) -> tuple[float, bool, bool]:
        """One turn: reward, whether the episode is over, whether a tool was used."""
        self.num_turns += 1
        if token in (LOOK_LEFT, LOOK_RIGHT):
            side = token - LOOK_LEFT
            is_new = self.seen[side] == UNKNOWN
            self.seen[side] = self.code[side]
            return 0.0, False, is_new
        if token != self.code[self.num_said]:
            return 0.0, True, False
        self.num_said += 1
        is_open = self.num_said == 2
        return (1.2 - 0.05 * self.num_turns if is_open else 0.0), is_open, False


# -- 2. The policy: what has been shown in, a distribution over tokens out ------------------------------------------


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.digit = nn.Embedding(DIGITS + 1, 16)
        self.said = nn.Embedding(3, 16)
        self.head = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, NUM_TOKENS))

    def forward(self, observations: Tensor) -> Tensor:
        """[..., 3] observations in, [..., tokens] log-probabilities out."""
        left, right, said = observations.unbind(-1)
        read = torch.cat([self.digit(left), self.digit(right), self.said(said)], dim=-1)
        return self.head(read).log_softmax(-1)


# -- 3. Rollout: groups of episodes of the same task ----------------------------------------------------------------


@dataclass
class Episode:
    group: int
    observations: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    old_logprobs: list[float] = field(default_factory=list)
    """Of the policy that played it: replay needs them later."""
    reward: float = 0.0
    num_tool_turns: int = 0


@torch.no_grad()
def play(policy: Policy, rng: random.Random) -> list[Episode]:
    """GROUP_SIZE episodes of each of NUM_TASKS random codes, all in step with each other."""
    codes = [(rng.randrange(DIGITS), rng.randrange(DIGITS)) for _ in range(NUM_TASKS)]
    episodes = [Episode(group) for group in range(NUM_TASKS) for _ in range(GROUP_SIZE)]
    active = [(episode, Safe(codes[episode.group])) for episode in episodes]
    for _ in range(MAX_TURNS):
        observations = [safe.observation() for _, safe in active]
        logprobs = policy(torch.tensor(observations))
        tokens = torch.multinomial(logprobs.exp(), 1).squeeze(1)
        still_active = []
        for (episode, safe), seen, token, row in zip(active, observations, tokens.tolist(), logprobs, strict=True):
            reward, is_over, used_tool = safe.step(token)
            episode.observations.append(seen)
            episode.tokens.append(token)
            episode.old_logprobs.append(float(row[token]))
            episode.reward += reward
            episode.num_tool_turns += used_tool
            if not is_over:
                still_active.append((episode, safe))
        active = still_active
        if not active:
            break
    return episodes


# -- 4. The loss of some episodes: rows of tokens, padded on the right ----------------------------------------------


def padded(rows: list[list[float]]) -> Tensor:
    return torch.tensor([[*row, *[0.0] * (MAX_TURNS - len(row))] for row in rows])


def loss_inputs(policy: Policy, episodes: list[Episode], advantages: list[float]) -> LossInputs:
    """Every tensor is [episodes, turns]; an episode's advantage is that of each of its tokens."""
    lengths = [len(e.tokens) for e in episodes]
    observations = torch.tensor(
        [e.observations + [[0, 0, 0]] * (MAX_TURNS - n) for e, n in zip(episodes, lengths, strict=True)]
    )
    logprobs = policy(observations)
    tokens = padded([e.tokens for e in episodes]).long()
    return LossInputs(
        logprobs=logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1),
        old_logprobs=padded([e.old_logprobs for e in episodes]),
        advantages=padded([[a] * n for a, n in zip(advantages, lengths, strict=True)]),
        mask=padded([[1.0] * n for n in lengths]).bool(),
        entropy=-(logprobs.exp() * logprobs).sum(-1),
    )


clip = partial(clipped_surrogate, clip_low=0.2, clip_high=0.28)
"""PPO's clipped objective with clip-higher."""


# -- 5. The training step -------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """What self-imitation keeps between steps."""

    buffer: ReplayBuffer[Episode]
    history: RewardHistory
    """Mean rewards of the latest groups."""

    def draw(self, count: int, step: int, rng: random.Random) -> tuple[list[Episode], list[float]]:
        """Remembered episodes that beat today's baseline, the median of the history, and by how much they do.

        An old advantage would compare an episode with siblings of a weaker policy: it is recalibrated. Only the task's
        reward counts here, never the bonus.
        """
        self.buffer.drop_stale(step)
        baseline = self.history.median()
        drawn = self.buffer.sample(count, rng, where=lambda stored: stored.reward > baseline)
        advantages = recalibrate(torch.tensor([stored.reward for stored in drawn]), baseline)
        return [stored.item for stored in drawn], advantages.tolist()


def train(*, is_spear: bool, steps: int, seed: int, report_every: int = 0) -> list[float]:
    """Train from scratch; the success rate of each step's rollouts."""
    torch.manual_seed(seed)
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    memory = Memory(ReplayBuffer(capacity=512, max_age=5), RewardHistory(size=256))
    mu = cosine(1.0, 0.0, steps // 2)  # weight of the tool bonus: fades
    gamma = cosine(0.0, 0.5, steps // 4)  # weight of the replay loss: grows
    hold_back = partial(keep_low_covariance, fraction=0.02, low=0.005, high=60.0, generator=noise)
    successes = []

    for step in range(steps):
        # Play. An episode's score is its reward plus, for SPEAR, the bonus for tool calls as far as it still counts.
        episodes = play(policy, rng)
        rewards = torch.tensor([e.reward for e in episodes])
        scores = rewards.clone()
        if is_spear:
            scores += mu(step) * torch.tensor([tool_bonus.paid(e.num_tool_turns) for e in episodes])

        # Compare each episode with its siblings: the group-relative advantage.
        groups = torch.tensor([e.group for e in episodes])
        advantages = group_relative(scores, groups).tolist()
        policy_term = clip(loss_inputs(policy, episodes, advantages), entropy_bonus=0.03)
        loss = policy_term.loss

        # Replay what still beats the baseline, beside the on-policy term and by the same loss. Covariance clipping: a
        # random few of the tokens that push hardest towards certainty do not train.
        replayed, held_back = [], 0.0
        if is_spear:
            memory.history.add(rewards.view(NUM_TASKS, GROUP_SIZE).mean(1).tolist())
            replayed, recalibrated = memory.draw(len(episodes) // 4, step, rng)
            if replayed:
                replay_term = clip(loss_inputs(policy, replayed, recalibrated), keep=hold_back)
                held_back = float(replay_term.metrics["covariance_clip_fraction"])
                loss = loss + gamma(step) * replay_term.loss

        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

        # Remember the episodes that beat their siblings.
        if is_spear:
            wins = [(e, e.reward) for e, advantage in zip(episodes, advantages, strict=True) if advantage > 0]
            memory.buffer.add(wins, step)

        successes.append(float((rewards > 0).float().mean()))
        if report_every and (step + 1) % report_every == 0:
            tool_turns, entropy = fmean(e.num_tool_turns for e in episodes), float(policy_term.metrics["entropy"])
            line = f"success {fmean(successes[-report_every:]):.3f}  tool turns {tool_turns:.2f}  entropy {entropy:.2f}"
            curricula = (
                f"  mu {mu(step):.2f}  gamma {gamma(step):.2f}  replayed {len(replayed)}  held back {held_back:.1%}"
            )
            print(f"step {step + 1:4d}  {line}{curricula if is_spear else ''}", flush=True)
    return successes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", action="store_true", help="the base algorithm without SPEAR")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(is_spear=not options.base, steps=options.steps, seed=options.seed, report_every=options.steps // 10)


if __name__ == "__main__":
    main()
