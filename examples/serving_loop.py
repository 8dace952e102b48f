"""vLLM's scheduler in forty lines, with the price of a step: mean TTFT and TPOT of users who wait for their answers.

python examples/serving_loop.py
"""

from dataclasses import dataclass

from e2e.serving.serving_answer import deployment_of
from e2e.serving.serving_request import ServingRequest
from e2e.serving.step_price import Prompt, StepPrice

USERS, PROMPT, OUTPUT = 16, 1024, 64
deployment = deployment_of(ServingRequest(model="llama-3.1-8b", gpu="h100-sxm"))
engine, price = deployment.engine, StepPrice(deployment)


@dataclass(eq=False)
class Sequence:
    sent: float
    done: int = 0  # tokens of the prompt that are computed
    made: int = 0  # outputs so far
    first: float = 0.0


now, planned, to_send, waiting, running = 0.0, 0.0, 10 * USERS, [], []
ttft, tpot = [], []
while to_send or waiting or running:
    while to_send and len(waiting) + len(running) < USERS:  # who has an answer sends again
        waiting.append(Sequence(now))
        to_send -= 1
    if not running:  # the server takes its time before the engine has a request
        now = planned = max(now, waiting[0].sent + engine.server)
    budget, prompts = engine.token_budget - len(running), []
    for each in waiting:  # prompts fill the token budget
        taken = min(PROMPT - each.done, budget) if each.sent + engine.server <= planned else 0
        prompts += [(each, taken)] if taken else []
        budget -= taken
    planned = now  # the next step is planned while this one runs
    context = sum(PROMPT + each.made for each in running) / max(len(running), 1)
    now += price.step_seconds(len(running), context, [Prompt(taken, each.done) for each, taken in prompts])
    for each in running:
        each.made += 1
    for each, taken in prompts:
        each.done += taken
        if each.done == PROMPT:  # the first token is known
            each.first, each.made = now, 1
            running.append(each)
            ttft.append(now - each.sent)
    tpot += [(now - each.first) / (OUTPUT - 1) for each in running if each.made == OUTPUT]
    waiting = [each for each in waiting if each.done < PROMPT]
    running = [each for each in running if each.made < OUTPUT]
print(sum(ttft) / len(ttft), sum(tpot) / len(tpot))
