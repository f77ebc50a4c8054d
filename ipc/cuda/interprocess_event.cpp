#include "ipc/cuda/interprocess_event.h"

#include <bit>

namespace bulkhead::cuda {

InterprocessEvent::InterprocessEvent(std::shared_ptr<const Gpu> gpu, CUevent event)
    : gpu_{std::move(gpu)}, event_{event, [owner = gpu_](CUevent made) {
          const Gpu::Current current{*owner};
          (void)owner->driver().cuEventDestroy(made);
      }} {}

Result<InterprocessEvent> InterprocessEvent::create(std::shared_ptr<const Gpu> gpu) {
    const Driver& driver = gpu->driver();
    const Gpu::Current current{*gpu};
    CUevent event = nullptr;
    if (auto made = driver.check("cuEventCreate",
                                 driver.cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
        !made)
        return Error{made.error()}.during("creating an interprocess event");
    return InterprocessEvent{std::move(gpu), event};
}

Result<InterprocessEvent> InterprocessEvent::import(std::shared_ptr<const Gpu> gpu, const wire::CudaIpcHandle& handle) {
    const Driver& driver = gpu->driver();
    const Gpu::Current current{*gpu};
    CUevent event = nullptr;
    if (auto opened = driver.check("cuIpcOpenEventHandle",
                                   driver.cuIpcOpenEventHandle(&event, std::bit_cast<CUipcEventHandle>(handle)));
        !opened)
        return Error{opened.error()}.during("opening an interprocess event");
    return InterprocessEvent{std::move(gpu), event};
}

Result<wire::CudaIpcHandle> InterprocessEvent::handle() const {
    const Driver& driver = gpu_->driver();
    const Gpu::Current current{*gpu_};
    CUipcEventHandle handle{};
    if (auto got = driver.check("cuIpcGetEventHandle", driver.cuIpcGetEventHandle(&handle, event_.get())); !got)
        return got.error();
    return std::bit_cast<wire::CudaIpcHandle>(handle);
}

Result<> InterprocessEvent::record(CUstream stream) const {
    const Driver& driver = gpu_->driver();
    const Gpu::Current current{*gpu_};
    return driver.check("cuEventRecord", driver.cuEventRecord(event_.get(), stream));
}

Result<> InterprocessEvent::make_wait(CUstream stream) const {
    const Driver& driver = gpu_->driver();
    const Gpu::Current current{*gpu_};
    return driver.check("cuStreamWaitEvent", driver.cuStreamWaitEvent(stream, event_.get(), 0));
}

}  // namespace bulkhead::cuda
