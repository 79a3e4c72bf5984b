"""Runs that were never run: folders with the files of real ones, curves with the usual shapes and noise."""

import json
import math
import random
from pathlib import Path

STRENGTH = {"rpg-reinforce-urkl": 0.93, "rpg-urkl": 0.91, "dapo": 0.88, "grpo": 0.80}
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>&amp; \u2028 <!-- \"'"


def interval(p, n):
    """Wilson's, 95 %."""
    z = 1.96
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - half, middle + half


def make_run(folder: Path, algorithm="rpg-reinforce-urkl", seed=0, steps=60, tasks=("arithmetic",), lr=1e-3, every=5):
    rng = random.Random(f"{algorithm} {seed} {lr}")
    top, speed = STRENGTH.get(algorithm, 0.85) + rng.gauss(0, 0.01), 0.09 * rng.uniform(0.85, 1.15) * 60 / steps
    folder.mkdir(parents=True, exist_ok=True)
    rows, evals, tokens, seconds = [], {task: [] for task in tasks}, 0, 0.0
    for step in range(steps + 1):
        skill = 0.3 + (top - 0.3) * (1 - math.exp(-speed * step)) + (0.02 * math.sin(step / 7) if step else 0)
        row = {"step": step}
        if step:
            length = 18 + 14 * (1 - math.exp(-step * speed / 2)) + rng.gauss(0, 0.8)
            sampled = round(256 * length)
            tokens += sampled
            drift = 0.004 * rng.lognormvariate(0, 0.35) * (1.6 if algorithm == "grpo" else 1)
            times = {"rollout": 1.1 * length / 25, "reward": 0.03, "train": 0.8, "eval": 0.0, "checkpoint": 0.0}
            times = {name: value * rng.uniform(0.9, 1.15) for name, value in times.items()}
            times["eval"] = 1.4 if step % every == 0 else 0.0
            times["checkpoint"] = 0.12 if step % 10 == 0 else 0.0
            share = min(max(skill + rng.gauss(0, 0.03), 0), 1)
            row |= {
                "reward/mean": share - 0.02, "reward/std": math.sqrt(share * (1 - share)), "reward/solved": share,
                "reward/overlong": -0.01, "reward/failed": 0, "groups/kept": 32, "groups/sampled": 40,
                "groups/all_solved": share**6, "groups/none_solved": (1 - share) ** 4, "groups/rounds": 1,
                "length/mean": length, "length/max": 64, "length/truncated": max(0.0, rng.gauss(0.02, 0.01)),
                "loss": rng.gauss(0, 0.01), "grad_norm": rng.lognormvariate(-0.7, 0.3), "lr": lr,
                "entropy": 0.25 + 1.4 * math.exp(-speed * step * 0.8) + rng.gauss(0, 0.02),
                "ess": max(0.5, 1 - 6 * drift + rng.gauss(0, 0.003)),
                "kl/old": drift, "kl/ref": drift * 3 * (1 + step / 60),
                "ratio/p01": 1 - 20 * drift, "ratio/p50": 1.0, "ratio/p99": 1 + 24 * drift, "ratio/max": 1 + 90 * drift,
                "clip/low": drift * 2.2, "clip/high": drift * 3, "clip/dual": drift * 0.02,
                "mismatch/max_log_ratio": rng.lognormvariate(-11, 0.3), "mismatch/kl": rng.lognormvariate(-16, 0.3),
                "skipped": 0, "tokens": sampled, "tokens_total": tokens,
                **{f"time/{name}": value for name, value in times.items()}, "time/step": sum(times.values()) + 0.05,
                "speed/tokens_per_s": sampled / times["rollout"], "memory/peak_gb": 0.4,
            }  # fmt: skip
            seconds += row["time/step"]
        if step % every == 0 or step == steps:
            for i, task in enumerate(tasks):
                mean = round(1024 * min(max(skill * (1 - 0.35 * i) + rng.gauss(0, 0.012), 0), 1)) / 1024
                low, high = interval(mean, 128)
                row |= {f"eval/{task}/mean@8": mean, f"eval/{task}/mean@8_low": low, f"eval/{task}/mean@8_high": high}
                row |= {f"eval/{task}/pass@{k}": 1 - (1 - mean) ** (1 + 0.5 * math.log2(k)) for k in (1, 2, 4, 8)}
                row[f"eval/{task}/length"] = 20.0
                evals[task].append((step, mean))
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        f"algorithm: {algorithm}\nloss: {{}}\nmodel: builtin\nsteps: {steps}\nseed: {seed}\noutput: {folder.name}\n"
        f"task:\n  name: {tasks[0]}\nrollout:\n  prompts: 32\n  samples: 8\n  temperature: 1.0\noptim:\n  lr: {lr}\n"
    )
    summary = {
        "name": folder.name, "algorithm": algorithm, "model": "builtin", "parameters": 1_048_576, "task": tasks[0],
        "seed": seed, "device": "cpu", "steps": steps, "step": steps, "status": "finished",
        "started": "2026-01-02T03:04:05", "seconds": seconds, "tokens_total": tokens,
        "reward_failures": {"raised": 0, "timed_out": 0, "not_finite": 0},
        "versions": {"rpg": "0.1.0", "torch": "2.13.0"},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    make_samples(folder / "samples.jsonl", rng, steps, speed, top)
    return folder


def make_samples(path, rng, steps, speed, top):
    with path.open("w") as file:
        for step in range(1, steps + 1):
            for group in range(2):
                a, b, level = rng.randint(2, 99), rng.randint(2, 99), rng.randint(1, 4)
                skill = 0.3 + (top - 0.3) * (1 - math.exp(-speed * step))
                rewards = [float(rng.random() < skill) for _ in range(4)]
                mean = sum(rewards) / 4
                for reward in rewards:
                    guess = a + b if reward else a + b + rng.choice([-10, -1, 1, 10])
                    tens = f"{a - a % 10} + {b - b % 10} + {a % 10 + b % 10}"
                    text = f"{a} + {b}\n  = {tens}\n  = {guess}\n\nAnswer: {guess}"
                    sample = {
                        "step": step, "split": "eval" if step % 5 == 0 and group else "train", "group": group,
                        "prompt": f"Q: {a} + {b} = ?\nA:", "answer": str(a + b), "level": level, "response": text,
                        "reward": reward, "advantage": reward - mean,
                        "length": len(text) // 2, "finished": rng.random() < 0.97,
                    }  # fmt: skip
                    if sample["split"] == "eval":
                        del sample["advantage"]
                    file.write(json.dumps(sample) + "\n")


def make_many(folder: Path, tasks=("arithmetic",), seeds=3, steps=60):
    return [
        make_run(folder / f"{algorithm}-{seed}", algorithm, seed, steps=steps, tasks=tasks)
        for algorithm in STRENGTH
        for seed in range(seeds)
    ]
