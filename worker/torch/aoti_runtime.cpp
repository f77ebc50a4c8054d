#include "worker/torch/aoti_runtime.h"

#include <iostream>
#include <mutex>
#include <string_view>

#include <fmt/format.h>

#include "worker/model/load_limits.h"
#include "worker/torch/function.h"
#include "worker/torch/outputs.h"

namespace bulkhead::worker {
namespace {

/// Copies what is written to std::cerr, and passes it on. A compiled AOTInductor model that throws
/// prints its message there, and returns only a number. Writers are serialised.
class CerrTap final : public std::streambuf {
public:
    CerrTap() : target_{std::cerr.rdbuf()} { std::cerr.rdbuf(this); }
    void clear() {
        const std::lock_guard lock{mutex_};
        heard_.clear();
    }
    /// The last 16 KiB written since `clear`.
    [[nodiscard]] std::string text() const {
        const std::lock_guard lock{mutex_};
        return heard_;
    }

private:
    std::streamsize xsputn(const char* text, std::streamsize count) override {
        const std::lock_guard lock{mutex_};
        heard_.append(text, static_cast<std::size_t>(count));
        if (heard_.size() > 2 * limits::heard_bytes_max) heard_.erase(0, heard_.size() - limits::heard_bytes_max);
        return target_->sputn(text, count);
    }
    int_type overflow(int_type character) override {
        if (traits_type::eq_int_type(character, traits_type::eof())) return traits_type::not_eof(character);
        const char one = traits_type::to_char_type(character);
        return xsputn(&one, 1) == 1 ? character : traits_type::eof();
    }
    int sync() override {
        const std::lock_guard lock{mutex_};
        return target_->pubsync();
    }

    mutable std::mutex mutex_;
    std::string heard_;
    std::streambuf* const target_;  ///< last: with it std::cerr begins to write here
};

/// The process' only tap. The first call installs it; it is never removed: std::cerr may be
/// used while the process ends.
CerrTap& cerr_tap() {
    static CerrTap& tap = *new CerrTap;
    return tap;
}

/// Finds the model's message in what it printed: LibTorch's own if one of its operators failed,
/// else the last "Error: …" of the generated code. Empty if there is none.
std::string words_in(std::string_view heard) {
    for (const std::string_view start : {"Exception in aoti_torch: ", "Error: "}) {
        const auto at = heard.rfind(start);
        if (at == std::string_view::npos) continue;
        const auto words = heard.substr(at + start.size());
        return std::string{words.substr(0, words.find('\n'))};
    }
    return {};
}

class AotiRuntime final : public Runtime {
public:
    explicit AotiRuntime(std::unique_ptr<Function> function) : function_{std::move(function)} {}

    std::vector<at::Tensor> call(const config::MethodSpec& method, const std::vector<at::Tensor>& inputs,
                                 const std::vector<config::ParameterValue>& /*none*/) override {
        if (!method.takes_outputs()) return function_->call(inputs);
        const std::vector<at::Tensor> arguments = with_outs(method, inputs);
        function_->call(arguments);
        return outs_of(method, arguments);
    }

private:
    std::unique_ptr<Function> function_;
};

[[noreturn]] void disagree(const config::ModelSpec& spec, std::string what, std::string remedy) {
    throw ErrorException{{ErrorCode::config_invalid,
                          fmt::format("checking the package {}: {}", spec.file.string(), std::move(what)),
                          std::move(remedy)}};
}

/// Checks dynamic dims. A package takes one input's size for all dims of one symbolic size, and
/// does not tell which inputs share it.
void check_dynamic_dims(const config::ModelSpec& spec, const config::MethodSpec& method) {
    std::size_t count = 0;
    std::string unnamed;
    for (const auto& input : method.inputs)
        for (std::size_t d = 0; d < input.shape.size(); ++d) {
            if (input.shape[d].min == input.shape[d].max) continue;
            ++count;
            if (unnamed.empty() && input.shape[d].name.empty())
                unnamed = fmt::format("shape[{}] of input \"{}\"", d, input.name);
        }
    if (count > 1 && !unnamed.empty())
        disagree(spec,
                 fmt::format("{} has no name: an AOTInductor package does not check that its inputs' dynamic "
                             "dimensions agree, and would read past the shorter tensor",
                             unnamed),
                 "name them, such as `n=1..256`: those of one name must be of one size in a request; different names "
                 "mean sizes that may differ");
}

}  // namespace

void listen_for_words() { cerr_tap().clear(); }

void rethrow_in_own_words() {
    const auto words = words_in(cerr_tap().text());
    if (words.empty()) throw;
    throw std::runtime_error{words};
}

void check_package_declaration(const config::ModelSpec& spec, std::size_t input_count) {
    if (spec.methods.size() != 1)
        disagree(spec, fmt::format("{} methods are declared, a package has one", spec.methods.size()),
                 "declare `forward` alone, and one model for each package");
    const auto& method = spec.methods.front();
    if (!method.parameters.empty())
        disagree(spec, fmt::format("parameter \"{}\" is declared", method.parameters.front().name),
                 "a package takes tensors alone: what was a number at export is fixed; export it as an input tensor");
    if (!spec.reset_method.empty())
        disagree(spec, fmt::format("reset method \"{}\" is declared", spec.reset_method),
                 "a package has no second method: make the state an input and an output");
    if (const std::size_t declared = method.inputs.size() + (method.takes_outputs() ? method.outputs.size() : 0);
        declared != input_count)
        disagree(spec,
                 fmt::format("{} inputs {}are declared, the model takes {}", declared,
                             method.takes_outputs() ? "and `out` outputs " : "", input_count),
                 "declare them all, in the order of the exported module's arguments");
    check_dynamic_dims(spec, method);
}

std::unique_ptr<Runtime> make_aoti_runtime(std::unique_ptr<Function> function) {
    return std::make_unique<AotiRuntime>(std::move(function));
}

}  // namespace bulkhead::worker
