from datasets import Dataset

rows = [
    {
        "data_source": "note",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": "What is on page 2?"}],
        "reward_model": {"style": "rule", "ground_truth": str(n)},
        "extra_info": {
            "index": n,
            "need_tools_kwargs": True,
            "tools_kwargs": {"read_note": {"create_kwargs": {"secret": str(n)}}},
        },
    }
    for n in range(1000)
]
Dataset.from_list(rows).to_parquet("train.parquet")
