// bare_libtorch load|throughput|hold torchscript|aoti FILE [TOKENS COUNT]: the baseline of several
// benches. Loads the demo's models as a plain LibTorch program does, and runs one inference, or
// COUNT of them, of which it prints so many a second, or as many as it is asked for
// (tests/bench/peers/rounds.h) until it is killed.

#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include "tests/bench/peers/rounds.h"

namespace {

std::function<void()> torchscript(const std::string& file) {
    torch::jit::Module module = torch::jit::load(file);
    module.eval();
    return [module]() mutable { module.forward({torch::zeros({1, 512}), 16000}); };
}

std::function<void()> aoti(const std::string& file, std::int64_t tokens) {
    auto loader =
        std::make_shared<torch::inductor::AOTIModelPackageLoader>(file, "model", /*run_single_threaded=*/true);
    const std::vector<at::Tensor> inputs{torch::full({1, tokens}, 2003, torch::kInt64),
                                         torch::ones({1, tokens}, torch::kInt64)};
    return [loader, inputs] { loader->run(inputs); };
}

void print_throughput(const std::function<void()>& infer, int count) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) infer();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    std::printf("%.3f\n", count / elapsed.count());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: %s load|throughput|hold torchscript|aoti FILE [TOKENS COUNT]\n", argv[0]);
        return 2;
    }
    const c10::InferenceMode no_gradients;
    const std::string mode = argv[1];
    const auto infer = argv[2] == std::string{"torchscript"} ? torchscript(argv[3])
                                                             : aoti(argv[3], argc > 4 ? std::stoll(argv[4]) : 16);
    infer();
    if (mode == "throughput") print_throughput(infer, argc > 5 ? std::stoi(argv[5]) : 1);
    if (mode != "hold") return 0;
    return bulkhead::bench::serve_rounds(0, [&infer] {
        infer();
        return std::string{};
    });
}
