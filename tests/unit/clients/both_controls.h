#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "bulkhead/async_control.h"
#include "bulkhead/events.h"
#include "tests/support/clients/fake_daemon.h"
#include "tests/support/clients/loop.h"

namespace bulkhead::test {

/// An `AsyncControl` with the calls of a `ControlClient` and an `EventStream`: each runs the loop
/// until it is done.
class SteppedControl {
public:
    explicit SteppedControl(const std::filesystem::path& socket, std::vector<std::string> models = {})
        : control_{loop_.context.get_executor(), socket}, models_{std::move(models)} {}

    Result<Answer> call(std::string method, boost::json::object params = {},
                        std::optional<std::chrono::milliseconds> deadline = {}) {
        return loop_.run<Answer>([&](auto handler) {
            control_.async_call(std::move(method), std::move(params), deadline, std::move(handler));
        });
    }
    Result<boost::json::object> next() {
        return loop_.run<boost::json::object>(
            [&](auto handler) { control_.async_next_event(models_, std::move(handler)); });
    }

private:
    Loop loop_;
    AsyncControl control_;
    std::vector<std::string> models_;
};

template <typename C>
C connected(const FakeDaemon& daemon) {
    if constexpr (std::is_same_v<C, ControlClient>)
        return daemon.connect();
    else
        return C{daemon.path()};
}

template <typename C>
auto events_of(const FakeDaemon& daemon, std::vector<std::string> models) {
    if constexpr (std::is_same_v<C, ControlClient>)
        return EventStream::open(daemon.path(), std::move(models)).value();
    else
        return C{daemon.path(), std::move(models)};
}

/// What both clients promise: TYPED_TEST_SUITE(Suite, BothControls, ControlNames).
using BothControls = testing::Types<ControlClient, SteppedControl>;
struct ControlNames {
    template <typename C>
    static std::string GetName(int) {
        return std::is_same_v<C, ControlClient> ? "Blocking" : "Async";
    }
};

}  // namespace bulkhead::test
