#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "supervisor/base/deadline.h"
#include "supervisor/replica/fleet_context.h"

namespace bulkhead::supervisor {

/// Waits without a time limit until the GPU that a model may use works again. Looks every
/// `limits::gpu_retry`.
/// Thread  the loop
class GpuWait {
public:
    /// `over` receives the device, or empty if placing failed for another reason. Not called
    /// after destruction.
    GpuWait(FleetContext& context, const std::string& declared, std::function<void(std::optional<Device>)> over)
        : context_{context}, declared_{declared}, over_{std::move(over)} {}

    void begin();
    /// Looks at once; does nothing while it does not wait.
    void look();
    void end() { pause_.reset(); }
    [[nodiscard]] bool is_on() const { return pause_ != nullptr; }

private:
    FleetContext& context_;
    const std::string& declared_;
    const std::function<void(std::optional<Device>)> over_;
    std::shared_ptr<Deadline> pause_;  ///< until the next look; null: not waiting
};

}  // namespace bulkhead::supervisor
