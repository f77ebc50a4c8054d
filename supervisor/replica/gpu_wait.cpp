#include "supervisor/replica/gpu_wait.h"

#include <fmt/format.h>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {

void GpuWait::begin() {
    pause_ = std::make_shared<Deadline>(context_.io);
    pause_->arm(limits::gpu_retry, [this] { look(); });
}

void GpuWait::look() {
    if (!pause_) return;
    context_.blocking.run(
        fmt::format("placing it on device \"{}\"", declared_),
        [&gpus = context_.gpus, declared = declared_, quarantined = context_.gpu_quarantine.all()] {
            return place(gpus, declared, quarantined);
        },
        [this, waits = std::weak_ptr{pause_}](const Result<Device>& device) {
            if (waits.expired()) return;
            if (!device && (device.error().code == ErrorCode::resources_exhausted ||
                            device.error().code == ErrorCode::deadline_exceeded))
                return pause_->arm(limits::gpu_retry, [this] { look(); });
            end();
            over_(device ? std::optional{*device} : std::nullopt);
        });
}

}  // namespace bulkhead::supervisor
