#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "supervisor/base/deadline.h"
#include "supervisor/replica/fleet_context.h"

namespace bulkhead::supervisor {

/// Waits until the GPU that a model may use is in order, as long as that takes: looks now and then.
/// Thread  the loop
class GpuWait {
public:
    /// `over`: a device may be used, or looking for one fails otherwise (empty). Not called after the destruction.
    GpuWait(FleetContext& context, const std::string& declared, std::function<void(std::optional<Device>)> over)
        : context_{context}, declared_{declared}, over_{std::move(over)} {}

    void begin();
    /// Looks at once, if it waits.
    void look();
    void end() { pause_.reset(); }
    [[nodiscard]] bool is_on() const { return pause_ != nullptr; }

private:
    FleetContext& context_;
    const std::string& declared_;
    const std::function<void(std::optional<Device>)> over_;
    std::shared_ptr<Deadline> pause_;  ///< until the next look; null: it does not wait
};

}  // namespace bulkhead::supervisor
