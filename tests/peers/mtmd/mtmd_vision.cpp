// Times llama.cpp's vision encoder on one crop. Loads an mmproj GGUF through mtmd's internal clip.h and encodes the same
// picture again and again; no text model is needed. The picture is noise: the encoder's time does not depend on it.

#include "clip.h"
#include "clip-impl.h"
#include "ggml-cpu.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace {

struct Options {
    std::string mmproj;
    std::string embeddings_to; // raw f32, (tokens, width); empty: not written
    clip_flash_attn_type flash_attn = CLIP_FLASH_ATTN_TYPE_AUTO;
    int threads = 2;
    int rounds = 5;
    int side_px = 448;
    bool verbose = false;
};

const char USAGE[] =
    "usage: mtmd-vision --mmproj FILE [--threads 2] [--rounds 5] [--side 448] [--flash-attn auto|on|off]\n"
    "                   [--embeddings FILE] [--verbose]\n";

[[noreturn]] void refuse(const std::string & why) {
    std::fprintf(stderr, "mtmd-vision: %s\n%s", why.c_str(), USAGE);
    std::exit(2);
}

int positive(const std::string & option, const std::string & text) {
    char * end = nullptr;
    const long n = std::strtol(text.c_str(), &end, 10);
    if (*end != '\0' || n < 1 || n > 100000) refuse(option + ": found \"" + text + "\", expected a number from 1");
    return (int) n;
}

clip_flash_attn_type flash_attn_of(const std::string & text) {
    if (text == "auto") return CLIP_FLASH_ATTN_TYPE_AUTO;
    if (text == "on") return CLIP_FLASH_ATTN_TYPE_ENABLED;
    if (text == "off") return CLIP_FLASH_ATTN_TYPE_DISABLED;
    refuse("--flash-attn: found \"" + text + "\", expected auto, on or off");
}

Options parse(int argc, char ** argv) {
    Options o;
    for (int i = 1; i < argc; i++) {
        const std::string key = argv[i];
        if (key == "--verbose") {
            o.verbose = true;
            continue;
        }
        if (i + 1 == argc) refuse(key + ": a value is missing, or the option is unknown");
        const std::string value = argv[++i];
        if (key == "--mmproj") o.mmproj = value;
        else if (key == "--embeddings") o.embeddings_to = value;
        else if (key == "--flash-attn") o.flash_attn = flash_attn_of(value);
        else if (key == "--threads") o.threads = positive(key, value);
        else if (key == "--rounds") o.rounds = positive(key, value);
        else if (key == "--side") o.side_px = positive(key, value);
        else refuse("unknown option " + key);
    }
    if (o.mmproj.empty()) refuse("--mmproj is missing");
    return o;
}

void log_warnings(ggml_log_level level, const char * text, void * verbose) {
    if (*static_cast<bool *>(verbose) || level >= GGML_LOG_LEVEL_WARN) std::fputs(text, stderr);
}

// A crop as the preprocessor hands it on: RGBRGB..., -1 to 1.
clip_image_f32 noise(int side_px) {
    std::mt19937 rng(1);
    std::uniform_real_distribution<float> pixel(-1.0f, 1.0f);
    std::vector<float> rgb((size_t) side_px * side_px * 3);
    for (float & x : rgb) x = pixel(rng);
    clip_image_f32 image;
    image.set_size({side_px, side_px}, /* is_placeholder */ false, /* is_audio */ false);
    image.cpy_buf(rgb);
    return image;
}

double cpu_ms() {
    rusage u;
    getrusage(RUSAGE_SELF, &u);
    return 1e3 * (u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-3 * (u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    const size_t half = v.size() / 2;
    return v.size() % 2 ? v[half] : (v[half - 1] + v[half]) / 2;
}

} // namespace

int main(int argc, char ** argv) {
    Options o = parse(argc, argv);
    g_logger_state = {log_warnings, &o.verbose};
    ggml_log_set(log_warnings, &o.verbose);

    clip_context_params params = {};
    params.use_gpu = false;
    params.flash_attn_type = o.flash_attn;
    params.image_min_tokens = -1;
    params.image_max_tokens = -1;
    clip_ctx * ctx = clip_init(o.mmproj.c_str(), params).ctx_v;
    if (ctx == nullptr) {
        std::fprintf(stderr, "mtmd-vision: %s: no vision encoder loaded; run with --verbose\n", o.mmproj.c_str());
        return 1;
    }

    const clip_image_f32 image = noise(o.side_px);
    const int tokens = clip_n_output_tokens(ctx, &image);
    const int width = clip_n_mmproj_embd(ctx);
    std::vector<float> embeddings((size_t) tokens * width);

    std::vector<double> wall_ms;
    for (int round = 0; round <= o.rounds; round++) { // round 0 warms up: it allocates the graph's memory
        const double cpu_before_ms = cpu_ms();
        const auto before = std::chrono::steady_clock::now();
        if (!clip_image_encode(ctx, o.threads, &image, embeddings)) return 1;
        const std::chrono::duration<double, std::milli> wall = std::chrono::steady_clock::now() - before;
        // On an idle machine CPU time is wall time x threads; less means that a neighbour ran, and the round is void.
        const double busy = (cpu_ms() - cpu_before_ms) / wall.count();
        std::printf("%s %d: %.1f ms, %.2f CPUs\n", round ? "round" : "warm-up", round, wall.count(), busy);
        std::fflush(stdout);
        if (round) wall_ms.push_back(wall.count());
    }

    double sum = 0, squares = 0;
    for (float x : embeddings) sum += x, squares += (double) x * x;
    const double mean = sum / embeddings.size();
    std::printf("median %.1f ms; %d threads, %d px, %d tokens x %d; output: mean %.4f, deviation %.4f\n", median(wall_ms),
                o.threads, o.side_px, tokens, width, mean, std::sqrt(squares / embeddings.size() - mean * mean));
    if (!o.embeddings_to.empty()) {
        std::ofstream out(o.embeddings_to, std::ios::binary);
        out.write(reinterpret_cast<const char *>(embeddings.data()), embeddings.size() * sizeof(float));
        if (!out) return 1;
    }
    clip_free(ctx);
    return std::isfinite(sum) ? 0 : 1;
}
