#include "worker/cuda/capture.h"

#include <atomic>
#include <utility>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

namespace bulkhead::worker::cuda {
namespace {

constexpr c10::DeviceIndex only_device = 0;  // CUDA_VISIBLE_DEVICES names one GPU
constexpr std::uint64_t fixed_seed = 20'260'101;

std::atomic<std::uint64_t> noted_allocated, noted_reserved, noted_peak;

/// The first exception of a capture is its cause; later ones are echoes.
struct FirstError {
    std::string words;
    int cuda_error = 0;
    void note(const std::exception& exception) {
        if (!words.empty()) return;
        words = exception.what();
        if (words.empty()) words = "an exception without words";
        if (const auto* accelerator = dynamic_cast<const c10::AcceleratorError*>(&exception))
            cuda_error = accelerator->get_error_code();
    }
};

}  // namespace

AllocatorMemory note_allocator_memory() {
    constexpr auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(only_device);
    noted_allocated = static_cast<std::uint64_t>(stats.allocated_bytes[all].current);
    noted_reserved = static_cast<std::uint64_t>(stats.reserved_bytes[all].current);
    noted_peak = static_cast<std::uint64_t>(stats.reserved_bytes[all].peak);
    return allocator_memory();
}

AllocatorMemory allocator_memory() noexcept { return {noted_allocated, noted_reserved, noted_peak}; }

CapturePool::CapturePool()
    : pool_{at::cuda::graph_pool_handle()}, random_{c10::make_intrusive<at::CUDAGeneratorState>()} {
    // This object also holds the default generator's state. A failed capture leaves `capturing_`
    // set in it; every random operation of an eager run is then refused, and LibTorch has no
    // call to undo that.
    const at::Generator& generator = at::cuda::detail::getDefaultCUDAGenerator(only_device);
    generator.unsafeGetGeneratorImpl()->graphsafe_set_state(
        c10::make_intrusive<at::CUDAGeneratorImpl>(only_device, random_));
}

CapturePool::Captured CapturePool::capture(const std::function<std::vector<at::Tensor>()>& body) {
    auto* graph = new at::cuda::CUDAGraph;  // leaked even on failure: LibTorch's allocators keep
                                            // pointing to it
    const std::uint64_t before = note_allocator_memory().reserved;
    FirstError error;
    std::vector<at::Tensor> outputs;
    bool begun = false;
    try {
        // Thread-local: other threads of this process may use CUDA meanwhile; only this one
        // is restricted.
        graph->capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
        begun = true;
        outputs = body();
    } catch (const std::exception& exception) {
        error.note(exception);
    }
    if (begun) {
        try {
            graph->capture_end();
        } catch (const std::exception& exception) {
            error.note(exception);
        }
    }
    if (const std::uint64_t after = note_allocator_memory().reserved; after > before) bytes_ += after - before;
    if (error.words.empty()) return {graph, std::move(outputs), std::nullopt};

    outputs.clear();
    take_back_failed_capture();
    return {nullptr, {}, diagnose_capture(error.words, error.cuda_error)};
}

void CapturePool::take_back_failed_capture() noexcept {
    (void)cudaGetLastError();  // the diagnosis reports it; the next call must not
    // capture_end stops at the first error and leaves these three undone. Those already done throw.
    try {
        c10::cuda::CUDACachingAllocator::endAllocateToPool(only_device, pool_);
    } catch (const std::exception&) {
    }
    try {
        at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(pool_);
    } catch (const std::exception&) {
    }
    random_->capturing_ = false;
}

void CapturePool::with_fixed_seed(const std::function<void()>& body) {
    struct Restore {
        at::CUDAGeneratorState& random;
        std::uint64_t seed;
        std::uint64_t offset;
        ~Restore() {
            random.seed_ = seed;
            random.philox_offset_per_thread_ = offset;
        }
    };
    const Restore restore{*random_, std::exchange(random_->seed_, fixed_seed),
                          std::exchange(random_->philox_offset_per_thread_, 0)};
    body();
}

}  // namespace bulkhead::worker::cuda
