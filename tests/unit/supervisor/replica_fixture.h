#pragma once

#include <poll.h>

#include <gmock/gmock.h>

#include "supervisor/base/limits.h"
#include "supervisor/replica/replica.h"
#include "tests/unit/supervisor/fake_gpus.h"
#include "tests/unit/supervisor/fake_keeper.h"
#include "tests/unit/supervisor/loop.h"

namespace bulkhead::supervisor::test {

using namespace std::chrono_literals;

/// A replica against a worker end that the test plays, with a keeper that starts no process.
class ReplicaTest : public testing::Test {
protected:
    ReplicaTest() : ReplicaTest{limits::blocking_job_deadline, limits::blocking_stuck_max} {}
    /// With these bounds of what is done off the loop.
    ReplicaTest(Deadline::Clock::duration job_deadline, std::size_t stuck_max)
        : blocking_{io_, job_deadline, stuck_max} {
        spec_.name = "m";
        spec_.device = "cpu";
        spec_.deadlines = {.load = 20s, .request = 1s, .drain = 20s, .kill = 20s};
        // A worker that obeys as most do: it ends at SIGTERM, and always at SIGKILL.
        keeper_.obeys = [](int) { return true; };
    }

    Replica& replica() {
        if (!replica_) replica_ = std::make_unique<Replica>(context_, spec_, 0, log_);
        return *replica_;
    }
    void wait_for(WorkerState state) {
        ASSERT_TRUE(run_until(io_, [&] { return replica().state() == state; }))
            << "waiting for " << to_string(state) << " in " << to_string(replica().state()) << ": "
            << replica().sentence();
    }
    bool wait(const std::function<bool()>& done) { return run_until(io_, done); }

    void load() {
        replica().load([this](Result<LoadedReplica> result) { loads_.push_back(std::move(result)); });
    }
    void unload() {
        replica().unload([this](Result<std::optional<Receipt>> result) { unloads_.push_back(std::move(result)); });
    }
    FakeWorker& spawned(std::size_t count = 1) {
        EXPECT_TRUE(wait([&] { return keeper_.workers.size() == count; }));
        return keeper_.latest();
    }
    /// A worker that was told what to load.
    FakeWorker& loading(std::size_t count = 1) {
        FakeWorker& worker = spawned(count);
        worker.hello();
        EXPECT_TRUE(wait([&] { return worker.got("configure"); }));
        return worker;
    }
    FakeWorker& ready() {
        load();
        FakeWorker& worker = loading();
        worker.ready();
        wait_for(WorkerState::ready);
        EXPECT_TRUE(wait([&] { return loads_.size() == 1; }));
        return worker;
    }
    Receipt receipt() {
        EXPECT_TRUE(wait([&] { return !unloads_.empty(); }));
        EXPECT_TRUE(unloads_.back()) << unloads_.back().error().text();
        EXPECT_TRUE(unloads_.back()->has_value());
        return **unloads_.back();
    }
    static bool at_end_of_file(const UniqueFd& socket) {
        pollfd entry{socket.get(), POLLIN, 0};
        return ::poll(&entry, 1, 0) == 1 && (entry.revents & POLLHUP) != 0;
    }

    boost::asio::io_context io_;
    Gpus gpus_;
    EventBus events_;
    BlockingQueue blocking_;
    FakeKeeper keeper_{io_};
    FleetContext context_{
        io_, keeper_, blocking_, gpus_, events_, {"/bin/false", "token", "/run/none", "/cache", {}}, nullptr};
    config::ModelSpec spec_;
    ModelLog log_{"m", std::nullopt};
    std::unique_ptr<Replica> replica_;
    std::vector<Result<LoadedReplica>> loads_;
    std::vector<Result<std::optional<Receipt>>> unloads_;
};

/// The same on a GPU of the fake NVML.
class GpuReplicaTest : public ReplicaTest {
protected:
    GpuReplicaTest() { spec_.device = "cuda:0"; }
    FakeGpus fake_{"gpu GPU-a 10000000000 Fake\n"};
};

}  // namespace bulkhead::supervisor::test
