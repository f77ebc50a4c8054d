#pragma once

#include <functional>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "supervisor/fleet/fleet.h"
#include "tests/unit/supervisor/fake_keeper.h"
#include "tests/unit/supervisor/loop.h"

namespace bulkhead::supervisor::test {

inline config::ModelSpec spec_of(const std::string& name) {
    config::ModelSpec spec;
    spec.name = name;
    spec.device = "cpu";
    return spec;
}

/// Keeps what is asked of it from being done, while it lives: a driver or a disk that hangs.
class BlockedQueue {
public:
    explicit BlockedQueue(BlockingQueue& blocking) {
        blocking.run(
            "waiting", [go = go_.get_future().share()] { return go.wait(), true; }, [](const Result<bool>&) {});
    }
    ~BlockedQueue() { go_.set_value(); }
    BlockedQueue(const BlockedQueue&) = delete;
    BlockedQueue& operator=(const BlockedQueue&) = delete;

private:
    std::promise<void> go_;
};

/// A fleet whose workers the test plays.
class FleetFixture : public testing::Test {
protected:
    FleetFixture() {
        keeper_.obeys = [](int) { return true; };
    }
    void declare(std::vector<config::ModelSpec> models) {
        fleet_.reset();
        declared_.models = std::move(models);
        fleet_.emplace(context_, declared_, std::nullopt);
    }
    bool wait(const std::function<bool()>& done) { return run_until(io_, done); }

    boost::asio::io_context io_;
    Gpus gpus_;
    EventBus events_;
    BlockingQueue blocking_{io_};
    FakeKeeper keeper_{io_};
    FleetContext context_{
        io_, keeper_, blocking_, gpus_, events_, {"/bin/false", "token", "/run/none", "/cache", {}}, nullptr};
    config::Fleet declared_;
    std::optional<Fleet> fleet_;
};

}  // namespace bulkhead::supervisor::test
