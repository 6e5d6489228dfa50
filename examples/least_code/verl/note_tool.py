from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class NoteTool(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.secrets = {}

    async def create(self, instance_id=None, secret="", **kwargs):
        instance_id = instance_id or str(uuid4())
        self.secrets[instance_id] = kwargs.get("create_kwargs", {}).get("secret", secret)
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        text = self.secrets[instance_id] if parameters.get("page") == 2 else "empty"
        return ToolResponse(text=text), 0.0, {}

    async def release(self, instance_id, **kwargs):
        del self.secrets[instance_id]
