/// A client that forks: the child has no part in its parent's channels.

#include <gtest/gtest.h>

#include "tests/support/clients/channel_calls.h"
#include "tests/support/clients/fake_daemon.h"
#include "tests/support/clients/fake_worker.h"
#include "tests/support/in_child.h"

namespace bulkhead {
namespace {

using namespace test;

TEST(ChannelFork, TheChildsChannelIsLostAndTheParentsServes) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        // The parent's: nothing of the child's came.
        w.answer(w.expect<channel::Infer>().request_id, {});
        w.await_hang_up();
    }};
    std::optional<Channel> channel = adopt(worker).value();
    const Input x = filled(*channel, {1, 2, 3});

    EXPECT_EQ(in_child([&] {
                  const Result<Reply> reply = channel->infer({.retry_safe = true});
                  if (reply || reply.error().code != ErrorCode::worker_lost) return 1;
                  channel.reset();  // unmaps and closes nothing that the child has made since
                  return 0;
              }),
              0);

    EXPECT_TRUE(infer(*channel, x));
}

TEST(ChannelFork, TheChildsControlClientMakesAConnectionOfItsOwn) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.answer(d.request("daemon.info"), 1);
        d.next_connection();  // the child's
        d.pong();
        d.answer(d.request("fleet.status"), 3);
    }};
    ControlClient control = daemon.connect();
    ASSERT_TRUE(control.call("daemon.info"));
    EXPECT_EQ(in_child([&] {
                  const Result<Answer> answer = control.call("fleet.status");
                  return answer && answer->result == 3 ? 0 : 1;
              }),
              0);
}

}  // namespace
}  // namespace bulkhead
