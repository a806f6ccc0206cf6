// How each client is told where this server is. `needs` is the route without which a client cannot work.

const QUESTION = "Why is the sky blue?";

export const CLIENTS = [
  { id: "curl", name: "curl", needs: "/v1/chat/completions", write: ({ origin, model, hasKey }) =>
    `curl ${origin}/v1/chat/completions \\\n  -H 'Content-Type: application/json' \\\n${hasKey ? '  -H "Authorization: Bearer $API_KEY" \\\n' : ""}  -d '${JSON.stringify({ model, messages: [{ role: "user", content: QUESTION }] })}'` },
  { id: "python", name: "OpenAI Python", needs: "/v1/chat/completions", write: ({ origin, model, key }) =>
    `# pip install openai\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${origin}/v1", api_key="${key}")\nstream = client.chat.completions.create(\n    model=${JSON.stringify(model)},\n    messages=[{"role": "user", "content": "${QUESTION}"}],\n    stream=True,\n)\nfor chunk in stream:\n    print(chunk.choices[0].delta.content or "", end="", flush=True)` },
  { id: "js", name: "OpenAI JS", needs: "/v1/chat/completions", write: ({ origin, model, key }) =>
    `// npm install openai\nimport OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${origin}/v1", apiKey: "${key}" });\nconst stream = await client.chat.completions.create({\n  model: ${JSON.stringify(model)},\n  messages: [{ role: "user", content: "${QUESTION}" }],\n  stream: true,\n});\nfor await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");` },
  { id: "langchain", name: "LangChain", needs: "/v1/chat/completions", write: ({ origin, model, key }) =>
    `# pip install langchain-openai\nfrom langchain_openai import ChatOpenAI\n\nmodel = ChatOpenAI(\n    base_url="${origin}/v1",\n    api_key="${key}",\n    model=${JSON.stringify(model)},\n)\nprint(model.invoke("${QUESTION}").content)` },
  { id: "llm", name: "llm", needs: "/v1/chat/completions", write: ({ origin, model, hasKey }) =>
    `# pip install llm; then add this to extra-openai-models.yaml in the folder of: llm logs path\n- model_id: shardcompute\n  model_name: ${model}\n  api_base: "${origin}/v1"${hasKey ? "\n  api_key_name: shardcompute   # llm keys set shardcompute" : ""}\n\n# and ask\nllm -m shardcompute '${QUESTION}'` },
  { id: "shardcompute", name: "ShardCompute", needs: "/v1/chat/completions", write: ({ origin, hasKey, key }) =>
    `from shardcompute.client import Client\n\nwith Client("${origin}"${hasKey ? `, api_key="${key}"` : ""}) as client:\n    print(client.chat("${QUESTION}").text)` },
  { id: "ollama", name: "Ollama", needs: "/api/chat", write: ({ origin, model }) =>
    `# pip install ollama\nfrom ollama import Client\n\nclient = Client(host="${origin}")\nfor part in client.chat(\n    model=${JSON.stringify(model)},\n    messages=[{"role": "user", "content": "${QUESTION}"}],\n    stream=True,\n):\n    print(part["message"]["content"], end="", flush=True)` },
  { id: "anthropic", name: "Anthropic", needs: "/v1/messages", write: ({ origin, model, key }) =>
    `# pip install anthropic\nfrom anthropic import Anthropic\n\nclient = Anthropic(base_url="${origin}", api_key="${key}")\nmessage = client.messages.create(\n    model=${JSON.stringify(model)},\n    max_tokens=512,\n    messages=[{"role": "user", "content": "${QUESTION}"}],\n)\nprint(message.content[0].text)` },
];
