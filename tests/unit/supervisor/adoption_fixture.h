#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "tests/unit/supervisor/replica_fixture.h"

namespace bulkhead::supervisor::test {

/// A replica, and the one that takes over from it under the next supervisor.
class AdoptionTest : public ReplicaTest {
protected:
    /// SIGKILL: nothing is said, nothing is closed but this process' own descriptors.
    void supervisor_dies() {
        replica_.reset();
        found_ = keeper_.hand_over();
        context_.gpu_mutexes.clear();
        loads_.clear();
        unloads_.clear();
    }
    /// The newest record goes to the replica, as the fleet does.
    void adopt() {
        ASSERT_FALSE(found_.empty());
        const auto ledger = ReplicaRecord::parse(found_.back().ledger);
        replica().adopt(std::move(found_.back()), ledger ? std::optional{*ledger} : std::nullopt, fingerprint(spec_));
    }
    static std::uint64_t nonce(FakeWorker& worker) {
        for (auto asked = worker.received.rbegin(); asked != worker.received.rend(); ++asked)
            if (asked->at("type").as_string() == "hello_asked") return asked->at("nonce").to_number<std::uint64_t>();
        return 0;
    }
    void answer(FakeWorker& worker, std::string_view phase, const json::object& more = {}) {
        worker.received.clear();
        ASSERT_TRUE(wait([&] { return worker.got("hello_asked"); }));
        worker.hello_again({{"configured", true}, {"phase", phase}, {"in_flight", 0}, {"grant", "none"}}, more);
    }
    ReplicaRecord kept(const FakeWorker& worker) {
        return ReplicaRecord::parse(keeper_.ledgers.at(worker.name.generation)).value();
    }

    std::vector<FoundWorker> found_;
};

}  // namespace bulkhead::supervisor::test
