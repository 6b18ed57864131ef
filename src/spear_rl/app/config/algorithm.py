"""The sections of `algorithm`. The string under a field is its documentation."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from spear_rl.replay.priorities import PRIORITIES
from spear_rl.settings.ranges import FilePath, Length, Name, OneOf, Range, Share, Steps, Weight


@dataclass
class BonusConfig:
    """Learn the ropes: the intrinsic reward for using tools. Only for spear-* algorithms."""

    mode: Literal["none", "constant", "cosine", "success"] = "success"
    """mu(t), the bonus's weight over the steps.
    none: no bonus
    constant: always 1
    cosine: half a cosine from 1 to 0 (the paper)
    success: 1 - s / target, not below 0, with s the running success rate of training episodes"""
    steps: Annotated[int, Steps] = 0
    """T_decay of the cosine; 0 is run.steps."""
    target: Annotated[float, Range(0, 1, "(]")] = 0.5
    """mode=success: the success rate at which the bonus ends."""
    count: Literal["turns", "distinct", "answered"] = "answered"
    """What is paid.
    turns: every turn that used a tool (the paper)
    distinct: every different call
    answered: every turn that used a tool, in episodes that end with an answer; nothing where every action is a tool"""


@dataclass
class ImitationConfig:
    """Trust the wins: replay of one's own good episodes. Only for spear-* algorithms."""

    enabled: bool = True
    """Off gives the base algorithm's updates bit for bit."""
    profile: Literal["paper", "spear"] = "spear"
    """Values of this section, algorithm.bonus and algorithm.entropy_floor; what is set beside it goes before it.
    paper: as published, with every switch beyond the paper off, also those that a preset has on
    spear: ours, the defaults"""
    from_: Annotated[str, FilePath(may_be_empty=True)] = ""
    """A .jsonl file, as sft.from, whose won episodes are in the buffer from the start; they age from step 0."""
    weight: Annotated[float, Weight] = 2.0
    """c, what gamma(t) grows to, or begins with; 1 in the paper."""
    warm_steps: Annotated[int, Steps] = 0
    """T_warm of gamma(t); 0 is half of run.steps."""
    schedule: Literal["steps", "success", "fading", "entropy"] = "entropy"
    """What gamma(t) follows.
    steps: half a cosine from 0 to weight over warm_steps (the paper)
    success: weight * s / target, not above weight, with s the running success rate of training episodes
    fading: weight * (1 - s / target), not below 0
    entropy: weight, less in proportion while the policy's entropy is below entropy_share of its first five steps'"""
    target: Annotated[float, Range(0, 1, "(]")] = 0.5
    """schedule=success or fading: the success rate at which gamma has its full weight, or ends."""
    entropy_share: Annotated[float, Range(0, 1, "(]")] = 0.8
    """schedule=entropy: the share of the first entropy below which gamma falls."""
    fraction: Annotated[float, Range(0, 100)] = 1.0
    """Replayed episodes per step, as a fraction of those played."""
    capacity: Annotated[int, Range(1, 1_000_000)] = 2048
    """What the buffer holds; with when_full, what is drawn at once."""
    unit: Literal["episodes", "turns"] = "episodes"
    """What capacity counts.
    episodes: whole episodes
    turns: turns that train again (the authors' code on ALFWorld and WebShop)"""
    max_age: Annotated[int, Range(1, 10_000_000, unit="steps")] = 10
    """Steps after which an episode is forgotten."""
    history: Annotated[int, Range(1, 10_000_000)] = 1024
    """Group means in the baseline's window."""
    baseline: Literal["percentile", "siblings"] = "siblings"
    """b, what A' = R - b compares a remembered episode with.
    percentile: the percentile below of recent group means (the paper)
    siblings: its group's mean when played or, if higher, its family's since max_age steps ago (see per_family)"""
    percentile: Annotated[float, Range(0, 100)] = 50.0
    """Of the window: the baseline b."""
    per_family: bool = False
    """A baseline for each kind of task instead of one for all."""
    priority: Annotated[list[Annotated[str, OneOf(PRIORITIES, "priority")]], Length(0, 6, "words")] = field(
        default_factory=list
    )
    """What every_step draws first, e.g. ["medium", "fresh"]: weights, multiplied; none is uniform (the paper).
    medium: p (1 - p), p the task's current success rate, else its family's; never from 0.9 on
    hard: 1 - its group's success rate when played
    rare: 1 over that rate, so that each task is drawn alike, however often it was won
    confident: by the rank of its tokens' mean log-probability when played
    fresh: half per 2 steps of age
    family: every task family has the same total weight, so that none is crowded out"""
    draw: Literal["every_step", "when_full"] = "every_step"
    """When remembered episodes are replayed.
    every_step: a fraction every step
    when_full: `capacity` at once when more than 1.5 times as many qualify (the authors' code)"""
    gate: Literal["both", "old", "new"] = "both"
    """Which advantage of an episode must be positive.
    both: when played and now
    old: when played
    new: now, against the current baseline"""
    update: Literal["joint", "separate"] = "joint"
    """Where replayed rows train.
    joint: in the on-policy optimizer step (the paper)
    separate: in optimizer steps of their own after it (the authors' code)"""
    divide_by_std: bool | None = None
    """Divide A' by a typical std of recent groups; unset is as the base does, false is the paper's A' = R - b."""
    reweight: Annotated[float, Weight] | None = None
    """If set, A' = reweight * A instead of recalibrating against the baseline."""
    admit_by_score: bool = False
    """Remember what beats its siblings with bonus, penalties and step part too (the paper), not by the reward alone."""
    skip_invalid: bool = True
    """Turns that the environment could not act on, or that hit their token limit, do not train again."""
    scale_by_rows: bool = True
    """Weigh replay by episodes drawn over episodes wanted; off, one alone weighs as much as all (the paper)."""
    max_second_moment: Annotated[float, Range(1, 1_000_000, zero="no bound")] = 0.0
    """A replayed row whose mean squared ratio (policy to sampling policy) is larger does not train."""
    require_tool: bool = False
    """Remember only episodes that used a tool."""
    age_decay: Annotated[float, Share] = 1.0
    """Multiplies A' for every step of age."""
    keep_step_part: bool | Literal["auto"] = "auto"
    """Replay the step advantages of a win too (GiGPO); auto: if the base has them; false: never, as in the paper."""
    join_lost: bool = False
    """A stored win of its task joins a group that lost, and trains there; no use unless rollout.return_share is on."""


@dataclass
class CovarianceConfig:
    """Against over-confidence: hold back tokens whose advantage and log-probability rise together."""

    replay: Literal["clip", "kl", "none"] = "clip"
    """For replayed rows (part of SPEAR).
    clip: such tokens do not train (Clip-Cov)
    kl: such tokens get a KL penalty (KL-Cov)
    none: nothing is held back"""
    on_policy: Literal["clip", "kl", "none"] = "none"
    """For on-policy rows, with the same settings; off so that SPEAR's own effect shows.
    clip: such tokens do not train (Clip-Cov)
    kl: such tokens get a KL penalty (KL-Cov)
    none: nothing is held back"""
    fraction: Annotated[float, Share] = 0.02
    """Share of tokens held back."""
    low: Annotated[float, Range(0, 1_000_000)] = 2.0
    """Smallest covariance considered; 1 on math, 2 where rewards are ten times larger."""
    high: Annotated[float, Range(0, 1_000_000)] = 60.0
    """Largest covariance considered; 40 on math."""
    beta: Annotated[float, Weight] = 1.0
    """Weight of kl's penalty."""
    joint_means: bool = False
    """Replay: covariances about the means of all rows of a joint optimizer step, not of the replayed ones alone."""


@dataclass
class FiltersConfig:
    """What does not train, each with a switch of its own. Only for dr-bot-* algorithms."""

    overlong: bool = True
    """Drop answers that hit their token limit."""
    void: bool = True
    """Drop turns without a well-formed action."""
    repetitive: bool = True
    """Drop answers in which a run of 20 tokens occurs 10 times or more."""
    unreadable: bool = True
    """Drop answers with replacement characters or wrongly decoded text."""
    flat_groups: bool = True
    """Drop groups without spread, and all but the share algorithm.keep_groups of the others."""


@dataclass
class PPOConfig:
    """The critic and generalised advantage estimation. Only for algorithms with ppo in their name."""

    level: Literal["token", "turn"] = "token"
    """What has a value and an advantage of its own.
    token: every token that the policy writes
    turn: every turn; its tokens share the advantage"""
    gamma: Annotated[float, Share] = 1.0
    """Discount per token or per turn."""
    lam: Annotated[float, Share] = 1.0
    """Lambda of GAE: 1 takes the whole return, 0 the one-step TD error."""
    bootstrap: bool = False
    """After a limit cut an episode off, count its last value; off, nothing: the limit is part of the task."""
    learning_rate: Annotated[float, Range(0, 1, "(]")] | None = None
    """The critic's, constant; unset is optim.learning_rate."""
    value_clip: Annotated[float, Range(0, 1_000_000)] = 0.0
    """How far a value may move in one step before its loss goes flat, in units of the reward; 0 is no clip."""
    warmup_steps: Annotated[int, Steps] = 0
    """Steps at the start in which the critic learns alone."""


@dataclass
class AlgorithmConfig:
    """What is learned from the episodes."""

    name: Name = "spear-dr-bot-grpo"
    """By name (`spear list`) or your own, package.module:function; with spear-, dr-bot- or spear-dr-bot- before it."""
    invalid_penalty: Annotated[float, Weight] = 0.1
    """Penalty per turn that the environment could not act on."""
    format_bonus: Annotated[float, Weight] = 0.0
    """Bonus per episode without such a turn (0.1 in the paper's formula)."""
    divide_by_std: bool | None = None
    """Divide advantages by the group's std (PPO: whiten them over the step); unset is the algorithm's own."""
    clip_low: Annotated[float, Range(0, 1, "(]")] | None = None
    """PPO's lower clip; unset is the algorithm's own."""
    clip_high: Annotated[float, Range(0, 1000, "(]")] | None = None
    """PPO's upper clip; unset is the algorithm's own."""
    dual_clip: Annotated[float, Range(1, 1_000_000, "(]")] | None = None
    """Bound on the loss of negative advantages; unset is the algorithm's own."""
    reduction: Literal["own", "sequence_mean", "token_mean", "fixed_length"] = "own"
    """How the loss of a mini-batch's tokens becomes one number, in the replay term too; a sequence is a row.
    own: the algorithm's: sequence_mean for grpo, fixed_length for dr-bot-*, token_mean for the others
    sequence_mean: the mean over rows of each row's token mean (GRPO as published)
    token_mean: the mean over all tokens (DAPO)
    fixed_length: the sum over a row's tokens divided by max_length, mean over rows (Dr. GRPO as published)"""
    entropy_bonus: Annotated[float, Weight] = 0.0
    """Weight of the entropy in the on-policy loss."""
    entropy_floor: Annotated[float, Range(0, 100, unit="nats per token")] | Literal["auto"] = 0.0
    """While the policy's entropy is below this, an entropy bonus grows up to what is lacking; 0 is off.
    auto: half of the mean over the run's first five steps"""
    kl: Annotated[float, Weight] = 0.0
    """Weight of the KL to the cold-started policy, over replayed rows too; 0 needs no reference model."""
    discount: Annotated[float, Share] = 0.95
    """GiGPO, HGPO, G2PO: discount of rewards-to-go."""
    step_weight: Annotated[float, Weight] = 1.0
    """GiGPO, HGPO, GraphGPO, G2PO: weight of the step advantage."""
    episode_weight: Annotated[float, Weight] = 1.0
    """Weight of the episode advantage beside it; the published HGPO has 0."""
    anchor: Literal["state", "text"] = "state"
    """GiGPO, HGPO, GraphGPO, G2PO: which turns of a group are in the same state.
    state: those in exactly the same state of the environment, seen or hidden
    text: those with the same observation (the published GiGPO)"""
    depth: Annotated[int, Range(0, 1000, unit="states")] = 2
    """HGPO: the most past states that turns of a step group share."""
    depth_power: Annotated[float, Range(0, 100)] = 1.0
    """HGPO: a group that shares k past states weighs (k + 1) to this power."""
    distance_discount: Annotated[float, Share] = 0.1
    """GraphGPO: worth of a turn that makes the way to success one turn longer, as a share of one that does not."""
    keep_groups: Annotated[float, Range(0, 1, "(]")] = 0.75
    """Dr.BoT: share of groups, those with the largest spread, that trains."""
    max_length: Annotated[int, Range(0, 2**40, unit="tokens")] = 0
    """Dr.BoT and fixed_length: the constant in place of a row's length; 0 is the most tokens a row may train."""
    bonus: BonusConfig = field(default_factory=BonusConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)
    filters: FiltersConfig = field(default_factory=FiltersConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
