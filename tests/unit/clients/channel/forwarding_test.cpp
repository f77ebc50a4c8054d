// Outputs of one worker as inputs of another, and slabs that are given back: docs/channel.md,
// "Lending" and "Returning".

#include <gtest/gtest.h>

#include "tests/support/clients/channel_calls.h"

namespace bulkhead::test {
namespace {

using enum wire::SlabDirection;
constexpr std::uint64_t both = wire::feature_lending | wire::feature_returning;

/// A worker that lends and returns.
void agree(FakeWorker& w) {
    w.welcome.features = both;
    w.greet();
}

TEST(Forwarding, ARefusedLoanIsTheErrorOfThatRequestAlone) {
    FakeWorker a{[](FakeWorker& w) {
        agree(w);
        w.answer(w.expect<channel::Infer>().request_id, {w.output("y", {4, 5, 6})});
    }};
    FakeWorker b{[](FakeWorker& w) {
        agree(w);
        const Error refused{ErrorCode::protocol_violation, "taking a slab", ""};
        w.send(channel::encode(channel::Failure{w.expect<channel::SlabLend>().request_id, refused}));
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    Channel from = adopt(a).value();
    Channel to = adopt(b).value();
    const Reply reply = infer(from, filled(from, {1, 2, 3})).value();
    const std::array<NamedInput, 1> inputs{{{"x", &reply.outputs[0]}}};

    EXPECT_EQ(to.submit({.inputs = inputs}).error().code, ErrorCode::protocol_violation);

    EXPECT_TRUE(infer(to, filled(to, {})));
}

TEST(Returning, AnAddedInputSlabThatStaysEmptyIsGivenBackWithTheNextRequest) {
    FakeWorker worker{[](FakeWorker& w) {
        agree(w);
        const auto request = w.expect<channel::SlabRequest>();
        w.offer(2, input, request.size_bytes, request.request_id);
        w.answer(w.expect<channel::Infer>().request_id, {});  // both are in use
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 2U);
        w.answer(w.expect<channel::Infer>().request_id, {});
        const auto again = w.expect<channel::SlabRequest>();
        w.offer(3, input, again.size_bytes, again.request_id);
    }};
    Channel channel =
        Channel::adopt(worker.client_end(), {.client = "test", .deadline = std::chrono::seconds{10}, .slab_idle = {}})
            .value();
    const std::array<std::int64_t, 1> half{FakeWorker::slab_bytes / 8};
    const std::array<std::int64_t, 1> most{FakeWorker::slab_bytes / 4 - 1024};
    const Input first = channel.allocate(wire::DType::float32, half).value();
    {
        const Input added = channel.allocate(wire::DType::float32, most).value();
        ASSERT_TRUE(infer(channel, first));
    }

    EXPECT_TRUE(infer(channel, first));

    EXPECT_TRUE(channel.allocate(wire::DType::float32, most));
}

TEST(Returning, AWorkerThatDidNotAgreeIsTakenAtItsWord) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::SlabRequest>();
        w.offer(2, input, request.size_bytes, request.request_id);
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    Channel channel =
        Channel::adopt(worker.client_end(), {.client = "test", .deadline = std::chrono::seconds{10}, .slab_idle = {}})
            .value();
    const std::array<std::int64_t, 1> whole{FakeWorker::slab_bytes / 4};
    const Input first = channel.allocate(wire::DType::float32, whole).value();
    static_cast<void>(channel.allocate(wire::DType::float32, whole).value());

    EXPECT_TRUE(infer(channel, first));
}

}  // namespace
}  // namespace bulkhead::test
