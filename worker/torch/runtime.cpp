#include "worker/torch/runtime.h"

#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <utility>

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/jit/runtime/jit_exception.h>

#include "worker/model/describe.h"
#include "worker/model/load_limits.h"

namespace bulkhead::worker {
namespace {

constexpr std::array<std::pair<wire::DType, at::ScalarType>, 12> types{{
    {wire::DType::boolean, at::kBool},
    {wire::DType::uint8, at::kByte},
    {wire::DType::int8, at::kChar},
    {wire::DType::int16, at::kShort},
    {wire::DType::int32, at::kInt},
    {wire::DType::int64, at::kLong},
    {wire::DType::float16, at::kHalf},
    {wire::DType::bfloat16, at::kBFloat16},
    {wire::DType::float32, at::kFloat},
    {wire::DType::float64, at::kDouble},
    {wire::DType::complex64, at::kComplexFloat},
    {wire::DType::complex128, at::kComplexDouble},
}};

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

at::ScalarType scalar_type(wire::DType dtype) {
    for (const auto& [ours, theirs] : types)
        if (ours == dtype) return theirs;
    TORCH_CHECK(false, "no such dtype: ", static_cast<int>(dtype));
}

std::optional<wire::DType> dtype_of(at::ScalarType type) {
    for (const auto& [ours, theirs] : types)
        if (theirs == type) return ours;
    return std::nullopt;
}

at::Tensor as_tensor(const TensorView& view) {
    return at::from_blob(view.bytes.data(), at::IntArrayRef{view.dims.data(), view.dims.size()},
                         at::TensorOptions{}.dtype(scalar_type(view.dtype)));
}

Error translate(const std::exception& exception, ErrorCode code, std::string_view attempt) {
    const auto words = own_words(exception);
    if (ran_out_of_memory(exception, words))
        return {ErrorCode::out_of_memory, fmt::format("{}: {}", attempt, words),
                "send smaller inputs, unload another model, or give this one a larger device"};
    return {code, fmt::format("{}: {}", attempt, words), {}};
}

}  // namespace bulkhead::worker
