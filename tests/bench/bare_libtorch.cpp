// bare_libtorch load|throughput torchscript|aoti FILE [TOKENS COUNT]: the baseline of two benches. Loads the demo's
// models as a plain LibTorch program does, runs one inference, or COUNT of them, and prints inferences per second.

#include <chrono>
#include <cstdio>
#include <string>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

namespace {

int run_torchscript(const std::string& file) {
    torch::jit::Module module = torch::jit::load(file);
    module.eval();
    module.forward({torch::zeros({1, 512}), 16000});
    return 0;
}

int run_aoti(const std::string& file, std::int64_t tokens, int count) {
    torch::inductor::AOTIModelPackageLoader loader{file, "model", /*run_single_threaded=*/true};
    const std::vector<at::Tensor> inputs{torch::full({1, tokens}, 2003, torch::kInt64),
                                         torch::ones({1, tokens}, torch::kInt64)};
    loader.run(inputs);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) loader.run(inputs);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (count > 0) std::printf("%.3f\n", count / elapsed.count());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: %s load|throughput torchscript|aoti FILE [TOKENS COUNT]\n", argv[0]);
        return 2;
    }
    const c10::InferenceMode no_gradients;
    const std::string kind = argv[2];
    if (kind == "torchscript") return run_torchscript(argv[3]);
    return run_aoti(argv[3], argc > 4 ? std::stoll(argv[4]) : 16, argc > 5 ? std::stoi(argv[5]) : 0);
}
