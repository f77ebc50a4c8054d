#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <ATen/DynamicLibrary.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include "config/fleet.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {

/// A LibTorch runner that knows its model's number of tensors; any other number would read
/// out of bounds.
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

/// Call it before a package is loaded. Packages then check dtype and shape of their inputs at each
/// run (else they would read garbage), and their error messages are captured.
void prepare_for_aoti();

/// Throws  ErrorException (config_invalid) if the declaration does not fit the model's
///         number of inputs
[[nodiscard]] std::unique_ptr<Runtime>
make_aoti_runtime(const config::ModelSpec& spec, std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner,
                  std::size_t input_count);

/// Call it in a catch block. Throws the message that the model printed, or rethrows if
/// it printed none.
[[noreturn]] void rethrow_in_own_words();

/// Loads a compiled model with one of LibTorch's runners, such as AOTIModelContainerRunnerCpu,
/// passing it the arguments. Throws what loading throws.
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
