#include <algorithm>
#include <new>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/jit/runtime/jit_exception.h>

#include "worker/model/describe.h"
#include "worker/model/load_limits.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {
namespace {

/// Extracts the words of "The following operation failed in the TorchScript interpreter. Traceback
/// … RuntimeError: words". The traceback's lines are indented or start with "Traceback"; code of
/// its last frame follows beneath.
std::string_view after_traceback(std::string_view text) {
    if (text.find("failed in the TorchScript interpreter") == std::string_view::npos) return text;
    for (const std::string_view start : {"\nRuntimeError: ", "\ntorch.jit.Error: "})
        if (const auto at = text.rfind(start); at != std::string_view::npos) return text.substr(at + start.size());
    return text.substr(text.rfind('\n', text.find_last_not_of('\n')) + 1);
}

std::string own_words(const std::exception& exception) {
    if (const auto* raised = dynamic_cast<const torch::jit::JITException*>(&exception))
        if (const auto message = raised->getOriginalMsg())
            return fmt::format("{}: {}", raised->getPythonClassName().value_or("RuntimeError"), *message);
    const auto* error = dynamic_cast<const c10::Error*>(&exception);
    std::string_view text = error != nullptr ? error->what_without_backtrace() : exception.what();
    text = trimmed(after_traceback(trimmed(text)));
    // Cuts what LibTorch appends if TORCH_SHOW_CPP_STACKTRACES is set, or a compiled
    // extension threw.
    for (const std::string_view stack : {"\nException raised from ", "\nC++ CapturedTraceback:"})
        text = text.substr(0, text.find(stack));

    std::string words{text.substr(0, limits::model_words_max)};
    std::ranges::replace(words, '\n', ' ');
    return words;
}

bool ran_out_of_memory(const std::exception& exception, std::string_view words) {
    return dynamic_cast<const c10::OutOfMemoryError*>(&exception) != nullptr ||
           dynamic_cast<const std::bad_alloc*>(&exception) != nullptr ||
           words.find("can't allocate memory") != std::string_view::npos ||
           words.find("out of memory") != std::string_view::npos;
}

}  // namespace

Error translate(const std::exception& exception, ErrorCode code, std::string_view attempt) {
    const auto words = own_words(exception);
    if (ran_out_of_memory(exception, words))
        return {ErrorCode::out_of_memory, fmt::format("{}: {}", attempt, words),
                "send smaller inputs, unload another model, or give this one a larger device"};
    return {code, fmt::format("{}: {}", attempt, words), {}};
}

}  // namespace bulkhead::worker
