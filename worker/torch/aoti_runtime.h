#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <ATen/DynamicLibrary.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include "config/fleet.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {

/// A LibTorch runner that knows how many tensors the model takes. With another number it would read out of bounds.
template <typename Runner>
class CountedRunner final : public Runner {
public:
    using Runner::Runner;

    [[nodiscard]] std::size_t input_count() {
        const auto count = reinterpret_cast<decltype(&AOTInductorModelContainerGetNumInputs)>(
            this->model_so_->sym("AOTInductorModelContainerGetNumInputs"));
        std::size_t inputs = 0;
        TORCH_CHECK(count(this->container_handle_, &inputs) == 0, "the model does not tell how many inputs it takes");
        return inputs;
    }
};

/// Called before a package is loaded: from then on it checks dtype and shape of its inputs at each run (it reads
/// garbage otherwise), and what it says on failing is heard.
void prepare_for_aoti();

/// Throws ErrorException (config_invalid) where the declaration does not fit a model of so many inputs.
[[nodiscard]] std::unique_ptr<Runtime>
make_aoti_runtime(const config::ModelSpec& spec, std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner,
                  std::size_t input_count);

/// Inside a catch block: throws the words that the model printed, or what was caught if it printed none.
[[noreturn]] void rethrow_in_own_words();

/// Loads a compiled model with one of LibTorch's runners, such as AOTIModelContainerRunnerCpu, and what its
/// constructor takes. Throws what loading throws.
template <typename Runner, typename... Arguments>
[[nodiscard]] std::unique_ptr<Runtime> load_aoti_with(const config::ModelSpec& spec, Arguments&&... arguments) {
    prepare_for_aoti();
    try {
        auto runner = std::make_unique<CountedRunner<Runner>>(std::forward<Arguments>(arguments)...);
        const auto inputs = runner->input_count();
        return make_aoti_runtime(spec, std::move(runner), inputs);
    } catch (const ErrorException&) {
        throw;
    } catch (const std::exception&) {
        rethrow_in_own_words();
    }
}

}  // namespace bulkhead::worker
