"""GPT-2 (124 million parameters, random weights) of transformers: generation in fp16 and training in bf16."""
import torch
import transformers

from measuring import main, workload


def gpt2():
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config()).cuda()


@workload
def torch_gpt2_generate_32_fp16():
    model, prompt = gpt2().half().eval(), torch.randint(0, 50000, (1, 16), device='cuda')

    @torch.no_grad()
    def step():
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, min_new_tokens=32,
                       do_sample=False, pad_token_id=0)
    return step, 1


@workload
def torch_gpt2_train_bf16():
    model, tokens = gpt2().train(), torch.randint(0, 50000, (4, 256), device='cuda')
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    return step, 5


main(torch.cuda.synchronize)
