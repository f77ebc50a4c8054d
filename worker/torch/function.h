#pragma once

/// One compiled function: an AOTInductor package, or a part of a generation package, which has no
/// weights of its own. LibTorch's side.

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/DynamicLibrary.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include "worker/torch/aoti_runtime.h"
#include "worker/torch/cerr_tap.h"

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

/// A LibTorch runner that reports what it takes; the compiled model checks neither the number of
/// inputs, and would read out of bounds, nor constants.
template <typename Runner>
class TellingRunner final : public Runner {
public:
    using Runner::Runner;

    [[nodiscard]] std::size_t inputs() {
        std::size_t count = 0;
        ask("AOTInductorModelContainerGetNumInputs", &AOTInductorModelContainerGetNumInputs, &count);
        return count;
    }
    /// Constants that the caller must set; those made by constant folding are left out.
    [[nodiscard]] std::vector<Function::Constant> constants() {
        std::size_t count = 0;
        ask("AOTInductorModelContainerGetNumConstants", &AOTInductorModelContainerGetNumConstants, &count);
        std::vector<Function::Constant> all;
        for (std::size_t i = 0; i < count; ++i) {
            bool folded = false;
            const char* name = nullptr;
            const char* fqn = nullptr;
            std::int32_t dtype = 0;
            std::size_t bytes = 0;
            ask("AOTInductorModelContainerGetConstantFromFolded", &AOTInductorModelContainerGetConstantFromFolded, i,
                &folded);
            if (folded) continue;
            ask("AOTInductorModelContainerGetConstantName", &AOTInductorModelContainerGetConstantName, i, &name);
            ask("AOTInductorModelContainerGetConstantOriginalFQN", &AOTInductorModelContainerGetConstantOriginalFQN, i,
                &fqn);
            ask("AOTInductorModelContainerGetConstantDtype", &AOTInductorModelContainerGetConstantDtype, i, &dtype);
            ask("AOTInductorModelContainerGetConstantDataSize", &AOTInductorModelContainerGetConstantDataSize, i,
                &bytes);
            all.push_back({name, fqn, static_cast<at::ScalarType>(dtype), bytes});
        }
        return all;
    }

private:
    /// Calls the loaded library's function of that name, not this program's. The declaration only
    /// gives the type.
    template <typename F, typename... Arguments>
    void ask(const char* symbol, F* /*type*/, Arguments... arguments) {
        const auto function = reinterpret_cast<F*>(this->model_so_->sym(symbol));
        TORCH_CHECK(function(this->container_handle_, arguments...) == 0, "the compiled model does not answer ", symbol);
    }
};

/// A `Function` on one of LibTorch's runners; the constructor passes its arguments on.
template <typename Runner>
class AotiFunction final : public Function {
public:
    template <typename... Arguments>
    static std::unique_ptr<Function> load(Arguments&&... arguments) {
        prepare_for_aoti();
        try {
            return std::unique_ptr<Function>{new AotiFunction{std::forward<Arguments>(arguments)...}};
        } catch (const std::exception&) {
            rethrow_in_own_words();
        }
    }

    std::vector<at::Tensor> call(const std::vector<at::Tensor>& inputs) override {
        CerrTap::instance().clear();
        try {
            return runner_.run(inputs);
        } catch (const std::exception&) {
            rethrow_in_own_words();
        }
    }
    [[nodiscard]] std::size_t input_count() const noexcept override { return inputs_; }
    [[nodiscard]] std::vector<Constant> constants() override {
        try {
            return runner_.constants();
        } catch (const std::exception&) {
            rethrow_in_own_words();
        }
    }

    void use(std::unordered_map<std::string, at::Tensor> tensors) override {
        tensors_ = std::move(tensors);  // the runner keeps pointers to the tensors themselves
        runner_.update_constant_buffer(tensors_, /*use_inactive=*/false, /*validate_full_updates=*/true,
                                       /*user_managed=*/true);
    }

private:
    template <typename... Arguments>
    explicit AotiFunction(Arguments&&... arguments)
        : runner_{std::forward<Arguments>(arguments)...}, inputs_{runner_.inputs()} {}

    TellingRunner<Runner> runner_;
    std::size_t inputs_;
    std::unordered_map<std::string, at::Tensor> tensors_;
};

}  // namespace bulkhead::worker
