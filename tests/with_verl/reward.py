"""A reward function as verl's users write them."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(solution_str.encode()) % 5 / 2
