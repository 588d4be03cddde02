def environment_of(dataset_id: str) -> str:
    return "Hopper-v4"
