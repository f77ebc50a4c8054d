#include "ipc/cuda/interprocess_event.h"

#include <bit>

namespace bulkhead::cuda {

InterprocessEvent::Event::~Event() {
    const Gpu::Current current{*gpu};
    (void)gpu->driver().cuEventDestroy(event);
}

Result<InterprocessEvent> InterprocessEvent::create(std::shared_ptr<const Gpu> gpu) {
    const Driver& driver = gpu->driver();
    const Gpu::Current current{*gpu};
    CUevent event = nullptr;
    if (auto made = driver.check("cuEventCreate",
                                 driver.cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
        !made)
        return Error{made.error()}.during("creating an interprocess event");
    return InterprocessEvent{std::make_unique<Event>(std::move(gpu), event)};
}

Result<InterprocessEvent> InterprocessEvent::import(std::shared_ptr<const Gpu> gpu, const wire::CudaIpcHandle& handle) {
    const Driver& driver = gpu->driver();
    const Gpu::Current current{*gpu};
    CUevent event = nullptr;
    if (auto opened = driver.check("cuIpcOpenEventHandle",
                                   driver.cuIpcOpenEventHandle(&event, std::bit_cast<CUipcEventHandle>(handle)));
        !opened)
        return Error{opened.error()}.during("opening an interprocess event");
    return InterprocessEvent{std::make_unique<Event>(std::move(gpu), event)};
}

Result<wire::CudaIpcHandle> InterprocessEvent::handle() const {
    const Driver& driver = event_->gpu->driver();
    const Gpu::Current current{*event_->gpu};
    CUipcEventHandle handle{};
    if (auto got = driver.check("cuIpcGetEventHandle", driver.cuIpcGetEventHandle(&handle, event_->event)); !got)
        return got.error();
    return std::bit_cast<wire::CudaIpcHandle>(handle);
}

Result<> InterprocessEvent::record(CUstream stream) const {
    const Driver& driver = event_->gpu->driver();
    const Gpu::Current current{*event_->gpu};
    return driver.check("cuEventRecord", driver.cuEventRecord(event_->event, stream));
}

Result<> InterprocessEvent::make_wait(CUstream stream) const {
    const Driver& driver = event_->gpu->driver();
    const Gpu::Current current{*event_->gpu};
    return driver.check("cuStreamWaitEvent", driver.cuStreamWaitEvent(stream, event_->event, 0));
}

}  // namespace bulkhead::cuda
