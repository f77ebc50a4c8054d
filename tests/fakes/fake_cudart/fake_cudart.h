#pragma once

#include <cstddef>
#include <string>
#include <vector>

/// A CUDA runtime without a GPU that writes down what it is asked: see README.md.
namespace fake_cudart {

struct Call {
    std::string name;     ///< "cudaMemcpyAsync"; of a copy with its direction:
                          ///< "cudaMemcpyAsync D2D"
    bool ours = false;    ///< called from worker/cuda, not from LibTorch
    void* stream = nullptr;
    void* event = nullptr;
    bool capturing = false;  ///< between the begin and the end of a capture on this thread
};

/// In the order in which they came, since the last `forget`. Thread  any
[[nodiscard]] std::vector<Call> calls();
void forget();
/// In each byte of mapped host memory, as of the latest kernel or graph that somebody waited for.
[[nodiscard]] std::byte written_by_kernels();
/// Whose calls are `ours`: those from the object, program or library, that has this address.
void ours_is_where(const void* address);

}  // namespace fake_cudart
