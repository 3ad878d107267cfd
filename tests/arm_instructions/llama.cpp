// llama.cpp's side of arm_instructions.py: does what `forerun bench --resident --threads 1` does, with the same tokens.
// Arguments: plain.gguf, tokens of the prompt, tokens decoded after it, rounds.
#include "llama.h"
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

static void check(bool good, const char *what)
{
    if (!good) {
        std::fprintf(stderr, "failed: %s\n", what);
        std::exit(1);
    }
}

// The tokens of `forerun bench`.
static std::vector<llama_token> tokens(int n, int vocab)
{
    uint64_t s = 0x9E3779B97F4A7C15;
    std::vector<llama_token> ids(n);
    for (auto &id : ids) {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        id = uint32_t(s >> 33) % vocab;
    }
    return ids;
}

static void log(ggml_log_level level, const char *text, void *)
{
    if (level == GGML_LOG_LEVEL_ERROR)
        std::fputs(text, stderr);
}

int main(int argc, char **argv)
{
    check(argc == 5, "arguments: plain.gguf prompt decode rounds");
    const int prompt = std::atoi(argv[2]), decode = std::atoi(argv[3]), rounds = std::atoi(argv[4]);
    llama_log_set(log, nullptr);
    llama_backend_init();
    std::puts(llama_print_system_info());
    llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    check(model, "loading");
    auto params = llama_context_default_params();
    params.n_ctx = params.n_batch = prompt + decode;
    params.n_threads = params.n_threads_batch = 1;
    llama_context *context = llama_init_from_model(model, params);
    check(context, "context");
    auto ids = tokens(prompt + decode, llama_vocab_n_tokens(llama_model_get_vocab(model)));
    for (int round = 0; round < rounds; round++) {
        llama_memory_clear(llama_get_memory(context), true);
        check(!llama_decode(context, llama_batch_get_one(ids.data(), prompt)), "prompt");
        check(llama_get_logits_ith(context, -1), "logits");
        for (int i = prompt; i < prompt + decode; i++) {
            check(!llama_decode(context, llama_batch_get_one(&ids[i], 1)), "decode");
            check(llama_get_logits_ith(context, -1), "logits");
        }
    }
    llama_free(context);
    llama_model_free(model);
}
