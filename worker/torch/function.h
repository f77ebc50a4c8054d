#pragma once

/// One compiled function: an AOTInductor package, or a part of a generation package, which has no
/// weights of its own. LibTorch's side.

#include <cstdlib>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/DynamicLibrary.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include "worker/torch/aoti_runtime.h"

namespace bulkhead::worker {

class Function {
public:
    virtual ~Function() = default;

    /// Throws what LibTorch throws, with the model's own message.
    virtual std::vector<at::Tensor> call(const std::vector<at::Tensor>& inputs) = 0;
    [[nodiscard]] virtual std::size_t input_count() const noexcept = 0;

    /// A weight that such a part needs before its first call.
    struct Constant {
        std::string name;  ///< in the compiled code
        std::string fqn;   ///< in the exported module and in the package
        at::ScalarType dtype;
        std::size_t bytes;
    };
    [[nodiscard]] virtual std::vector<Constant> constants() = 0;
    /// Sets the weights, by `Constant::name`. They are read in place for as long as this lives.
    virtual void use(std::unordered_map<std::string, at::Tensor> tensors) = 0;
};

/// Calls compiled code. Throws the message that it printed; what `work` throws if it printed none.
auto in_own_words(const auto& work) {
    listen_for_words();
    try {
        return work();
    } catch (const std::exception&) {
        rethrow_in_own_words();
    }
}

/// A `Function` on one of LibTorch's runners; the constructor passes its arguments on. The compiled
/// model checks neither the number of inputs, and would read out of bounds, nor constants, so it is
/// asked for both.
template <typename Runner>
class AotiFunction final : public Function, private Runner {
public:
    template <typename... Arguments>
    static std::unique_ptr<Function> load(Arguments&&... arguments) {
        // Packages then check dtype and shape of their inputs at each run; else they read garbage.
        ::setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", /*overwrite=*/0);
        return in_own_words(
            [&] { return std::unique_ptr<Function>{new AotiFunction{std::forward<Arguments>(arguments)...}}; });
    }

    std::vector<at::Tensor> call(const std::vector<at::Tensor>& inputs) override {
        return in_own_words([&] { return this->run(inputs); });
    }
    [[nodiscard]] std::size_t input_count() const noexcept override { return inputs_; }
    /// Without those made by constant folding, which the caller need not set.
    [[nodiscard]] std::vector<Constant> constants() override {
        return in_own_words([&] {
            std::size_t count = 0;
            ask("AOTInductorModelContainerGetNumConstants", &AOTInductorModelContainerGetNumConstants, &count);
            std::vector<Constant> all;
            for (std::size_t i = 0; i < count; ++i) {
                bool folded = false;
                const char* name = nullptr;
                const char* fqn = nullptr;
                std::int32_t dtype = 0;
                std::size_t bytes = 0;
                ask("AOTInductorModelContainerGetConstantFromFolded", &AOTInductorModelContainerGetConstantFromFolded,
                    i, &folded);
                if (folded) continue;
                ask("AOTInductorModelContainerGetConstantName", &AOTInductorModelContainerGetConstantName, i, &name);
                ask("AOTInductorModelContainerGetConstantOriginalFQN", &AOTInductorModelContainerGetConstantOriginalFQN,
                    i, &fqn);
                ask("AOTInductorModelContainerGetConstantDtype", &AOTInductorModelContainerGetConstantDtype, i, &dtype);
                ask("AOTInductorModelContainerGetConstantDataSize", &AOTInductorModelContainerGetConstantDataSize, i,
                    &bytes);
                all.push_back({name, fqn, static_cast<at::ScalarType>(dtype), bytes});
            }
            return all;
        });
    }

    void use(std::unordered_map<std::string, at::Tensor> tensors) override {
        tensors_ = std::move(tensors);  // the runner keeps pointers to the tensors themselves
        this->update_constant_buffer(tensors_, /*use_inactive=*/false, /*validate_full_updates=*/true,
                                     /*user_managed=*/true);
    }

private:
    template <typename... Arguments>
    explicit AotiFunction(Arguments&&... arguments) : Runner{std::forward<Arguments>(arguments)...} {
        ask("AOTInductorModelContainerGetNumInputs", &AOTInductorModelContainerGetNumInputs, &inputs_);
    }
    /// Calls the loaded library's function of that name, not this program's. The declaration only
    /// gives the type.
    template <typename F, typename... Arguments>
    void ask(const char* symbol, F* /*type*/, Arguments... arguments) {
        const auto function = reinterpret_cast<F*>(this->model_so_->sym(symbol));
        TORCH_CHECK(function(this->container_handle_, arguments...) == 0, "the compiled model does not answer ",
                    symbol);
    }

    std::size_t inputs_ = 0;
    std::unordered_map<std::string, at::Tensor> tensors_;
};

}  // namespace bulkhead::worker
