#pragma once

/// Explains a failed capture from LibTorch's message and CUDA's error number. Pure: no
/// tensor, no device.

#include <string>
#include <string_view>

namespace bulkhead::worker {

struct CaptureDiagnosis {
    std::string_view cause;  ///< one word for programs, listed in `diagnose_capture`
    std::string reason;      ///< a sentence for people
    std::string remedy;
    std::string where = {};  ///< "model.py:12 in forward"; empty if the exception does not tell
    std::string line = {};   ///< the model's own line there, such as "return x * n.item()"
    /// "reason (at where: line)"
    [[nodiscard]] std::string sentence() const;
};

/// Causes: host_read, cpu_tensor, legacy_stream, unjoined_stream, wrong_thread,
/// out_of_memory, generator,
///         unsupported_operation, package_code, output_on_cpu, keeps_state,
///             replay_differs, model_raised
///
/// `text` is the exception's message with TorchScript's traceback; the model's frame is the last
/// of its "original code". `cuda_error` is a cudaError_t; if 0 (unknown), the number is looked
/// for in the text.
[[nodiscard]] CaptureDiagnosis diagnose_capture(std::string_view text, int cuda_error = 0);

/// Captures that LibTorch accepted but whose replays would differ from an eager run.
[[nodiscard]] CaptureDiagnosis output_on_cpu(std::string_view output);
[[nodiscard]] CaptureDiagnosis keeps_state();
[[nodiscard]] CaptureDiagnosis replay_differs(std::string_view output);

}  // namespace bulkhead::worker
