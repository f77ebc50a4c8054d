#pragma once

#include <cstdint>
#include <vector>

#include "tests/unit/supervisor/planned_fleet_fixture.h"

namespace bulkhead::supervisor::test {

/// The ledger of a fleet, and what its workers answer a new supervisor.
class LedgerTest : public PlannedFleet {
protected:
    /// All but `foreign`.
    json::array ledger() {
        json::array all = fleet_->admission().ledger();
        for (json::value& device : all) device.as_object().erase("foreign");
        return all;
    }
    /// What other programs use of the GPUs, after a look. That of the host is read
    /// from this machine.
    std::vector<std::uint64_t> foreign() {
        fleet_->admission().leave(fleet_->admission().make_room("cuda:0", 0, "game", {}, [](const auto&) {}));
        settle();
        return {books("cuda:0", "foreign"), books("cuda:1", "foreign")};
    }
    /// Answers its new supervisor.
    void answer(FakeWorker& worker, bool configured, bool is_ready, std::uint32_t in_flight) {
        worker.hello_again({{"configured", configured},
                            {"phase", is_ready ? "ready" : "loading"},
                            {"in_flight", in_flight},
                            {"grant", "none"}});
    }
    /// Likewise, one that is ready and idle.
    void be_adopted(FakeWorker& worker) {
        ASSERT_TRUE(wait([&] { return worker.got("hello_asked"); }));
        answer(worker, true, true, 0);
        ASSERT_TRUE(wait([&] { return replica(worker.name.model).state() == WorkerState::ready; }));
    }
};

}  // namespace bulkhead::supervisor::test
