#pragma once

/// What a failed capture means, told from LibTorch's words and CUDA's number. Pure: no tensor, no device.

#include <string>
#include <string_view>

namespace bulkhead::worker {

struct CaptureDiagnosis {
    std::string_view cause;  ///< one word for programs, listed in `diagnose_capture`
    std::string where;       ///< "model.py:12 in forward", empty when the exception does not say
    std::string line;        ///< the model's own line there, such as "return x * n.item()"
    std::string reason;      ///< a sentence for people
    std::string remedy;
    /// "reason (at where: line)"
    [[nodiscard]] std::string sentence() const;
};

/// Causes: host_read, cpu_tensor, legacy_stream, unjoined_stream, wrong_thread, out_of_memory, generator,
///         unsupported_operation, package_code, output_on_cpu, keeps_state, replay_differs, model_raised
///
/// `text` is what the exception said, TorchScript's traceback included; the model's own frame is the last of
/// its "original code". `cuda_error` is cudaError_t's number, 0 when unknown: then it is looked for in the text.
[[nodiscard]] CaptureDiagnosis diagnose_capture(std::string_view text, int cuda_error = 0);

/// A capture that LibTorch took, and that would not give what an eager run gives.
[[nodiscard]] CaptureDiagnosis output_on_cpu(std::string_view output);
[[nodiscard]] CaptureDiagnosis keeps_state();
[[nodiscard]] CaptureDiagnosis replay_differs(std::string_view output);

}  // namespace bulkhead::worker
