"""`serve`: a target with its heads, for programs that use OpenAI's interface."""

from typing import Annotated, Any

import typer

from ..apps import serving
from ..apps.lines import print_to_stderr
from .inputs import at_hand, learning, load, remember_texts
from .options import Device, Dtype, GgufFile, Heads, Learn, NumAssistantTokens, Pack, Remember, Target, TrustRemoteCode


def serve(
    target: Target = None,
    gguf_file: GgufFile = None,
    heads: Heads = None,
    learn: Learn = None,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for all addresses of this machine.")] = (
        "localhost"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen at.")] = 8000,
    num_assistant_tokens: NumAssistantTokens = None,
    remember: Remember = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    pack: Pack = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HF_CLOVER_API_KEY",
            help="Require this key on every route except /health. Other users of the machine can see the option in "
            "its list of processes. They cannot see the variable.",
            show_default=False,
        ),
    ] = None,
    allow_chat_templates: Annotated[
        bool,
        typer.Option("--allow-chat-templates", help="Render templates that clients send; a template is a program."),
    ] = False,
    continuous_batching: Annotated[bool, typer.Option("--continuous-batching", hidden=True)] = False,
) -> None:
    """Serve a target over HTTP to programs that use OpenAI's interface, with heads in every request.

    It answers chat completions, text completions and responses, streamed or not, one request after the other. Clients
    send the value of --target as the name of the model; without --target, the name is printed at the start. The
    command needs the extra `serve`. docs/cli.md says what is refused, bounded and cancelled, and what to put in front
    of a public server.

    `GET /speculation` shows how many requests wait, and how many tokens a forward gives. If the first number is larger
    on average, move to an engine with continuous batching, such as vLLM. examples/scaling/README.md says why, and
    docs/vllm.md how.

    Example: hf-clover serve --target Qwen/Qwen3-0.6B --heads qwen3-0.6b-clover-x --port 8000
    """
    if continuous_batching:
        raise ValueError(
            "`--continuous-batching` cannot go with heads: its paged cache takes one token a row and step, and no "
            "tree. Leave it out, or run `transformers serve --continuous-batching` without heads."
        )
    if target is not None and heads is None and learn is None:
        raise ValueError("`--heads` or `--learn` is missing: without heads, `transformers serve` serves the target.")
    model, tokenizer, assistant = load(target, heads, dtype, device, trust_remote_code, gguf_file, pack, learn)
    if num_assistant_tokens is not None:
        # Not in the heads' config, which is saved with them.
        model.generation_config.num_assistant_tokens = num_assistant_tokens
    if api_key is None and host not in ("localhost", "127.0.0.1", "::1"):
        said = f"Listening at {host} without a key: anyone who reaches it gets answers. See `--api-key`."
        print_to_stderr(said, "yellow")
    name = target or at_hand().name
    options: dict[str, Any] = {"api_key": api_key, "allow_chat_templates": allow_chat_templates}
    with learning(learn, assistant, model, only_when_idle=True) as (assistant, _):
        remember_texts(assistant, remember)
        serving.serve(model, tokenizer, assistant, name, host, port, **options)
