#pragma once

/// One compiled function of a package, without weights of its own. LibTorch's side.

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "worker/torch/aoti_runtime.h"
#include "worker/torch/cerr_tap.h"

namespace bulkhead::worker::generation {

class Function {
public:
    virtual ~Function() = default;

    /// Throws what LibTorch throws, in the model's own words.
    virtual std::vector<at::Tensor> call(const std::vector<at::Tensor>& inputs) = 0;
    [[nodiscard]] virtual std::size_t input_count() const noexcept = 0;

    /// What it must be given before its first call.
    struct Constant {
        std::string name;  ///< of the code's own
        std::string fqn;   ///< of the exported module, by which the package knows it
        at::ScalarType dtype;
        std::size_t bytes;
    };
    [[nodiscard]] virtual const std::vector<Constant>& constants() const noexcept = 0;
    /// By `Constant::name`. They are read where they lie, as long as this lives.
    virtual void use(std::unordered_map<std::string, at::Tensor> tensors) = 0;
};

/// A LibTorch runner that tells what it takes: neither inputs nor constants are checked by the model itself.
template <typename Runner>
class TellingRunner final : public Runner {
public:
    using Runner::Runner;

    [[nodiscard]] std::size_t inputs() {
        std::size_t count = 0;
        ask("AOTInductorModelContainerGetNumInputs", &AOTInductorModelContainerGetNumInputs, &count);
        return count;
    }
    /// Those that somebody must give: what constant folding makes is left out.
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
    /// Calls what the loaded library, not this program, has under that name. The declaration gives the type alone.
    template <typename F, typename... Arguments>
    void ask(const char* symbol, F* /*type*/, Arguments... arguments) {
        const auto function = reinterpret_cast<F*>(this->model_so_->sym(symbol));
        TORCH_CHECK(function(this->container_handle_, arguments...) == 0, symbol, " failed");
    }
};

/// With one of LibTorch's runners, and what its constructor takes.
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
    [[nodiscard]] const std::vector<Constant>& constants() const noexcept override { return constants_; }

    void use(std::unordered_map<std::string, at::Tensor> tensors) override {
        tensors_ = std::move(tensors);  // the runner keeps pointers to the tensors themselves
        runner_.update_constant_buffer(tensors_, /*use_inactive=*/false, /*validate_full_updates=*/true,
                                       /*user_managed=*/true);
    }

private:
    template <typename... Arguments>
    explicit AotiFunction(Arguments&&... arguments)
        : runner_{std::forward<Arguments>(arguments)...}, inputs_{runner_.inputs()}, constants_{runner_.constants()} {}

    TellingRunner<Runner> runner_;
    std::size_t inputs_;
    std::vector<Constant> constants_;
    std::unordered_map<std::string, at::Tensor> tensors_;
};

}  // namespace bulkhead::worker::generation
