/// Addresses that outlive the slabs mapped there: who gets them, what lies there, and when a request is where a graph
/// of a place has its tensors. On a GPU or on the fake driver ($BULKHEAD_LIBCUDA).

#include <array>
#include <cstdlib>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/gpu/slabs/cuda_peer.h"
#include "tests/gpu/slabs/no_model.h"
#include "tests/gpu/slabs/on_gpu.h"
#include "worker/channel_slabs.h"
#include "worker/graph_places.h"

namespace bulkhead::worker {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using wire::SlabDirection;
using wire::SlabKind;
using Hold = std::shared_ptr<GraphPlaces::Hold>;

constexpr std::uint64_t MiB = 1 << 20;
constexpr std::uint64_t slab_bytes_max = 64 * MiB;

class Places : public test::OnGpu {
protected:
    /// As a model leaves them that has captured its graphs.
    std::shared_ptr<GraphPlaces> places(std::size_t count, const GraphPlaces::Needs& needs = {1, 1}) const {
        auto reserved = GraphPlaces::reserve(gpu, count, slab_bytes_max).value();
        for (std::size_t place = 0; place < count; ++place) {
            const auto memory = reserved->map_for_capture(place, needs);
            EXPECT_TRUE(memory) << memory.error().text();
            reserved->open(place, needs);
        }
        return reserved;
    }
    static std::int64_t report(const GraphPlaces& places, std::string_view what) {
        return places.report().at(what).as_int64();
    }
    void copy(const void* to, const void* from) const {
        const cuda::Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuMemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(to),
                                              reinterpret_cast<cuda::CUdeviceptr>(from), 1, stream),
                  cuda::CUDA_SUCCESS);
        ASSERT_EQ(gpu->driver().cuStreamSynchronize(stream), cuda::CUDA_SUCCESS);
    }
    void write(const SlabMemory& slab, unsigned char value) const { copy(slab.bytes().data(), &value); }
    int read(const SlabMemory& slab) const {
        unsigned char value = 0;
        copy(&value, slab.bytes().data());
        return value;
    }
};

TEST(PlaceLayout, IsThatOfTensorsAllocatedInOrderInAnEmptySlab) {
    const std::array<std::uint64_t, 4> sizes{5, 0, 64, 65};
    const GraphPlaces::Layout layout = GraphPlaces::lay_out(sizes);
    EXPECT_THAT(layout.offsets,
                ElementsAre(0, 64, 128, 192));  // tests/python/test_slabs.py expects the same of its own
    EXPECT_EQ(layout.size_bytes, 320U);
}

TEST_F(Places, EachChannelGetsMemoryOfItsOwnAtTheSameAddresses) {
    const auto all = places(1);
    Hold first = all->take();
    auto slab = first->make_slab(SlabDirection::input, 2 * MiB).value();
    const std::byte* const address = slab->bytes().data();
    EXPECT_EQ(address, all->address(0, SlabDirection::input));
    write(*slab, 1);
    test::CudaPeer client;
    ASSERT_EQ(client.ask(fmt::format("vmm import {} rw", slab->bytes().size()), slab->fd()), "ok");
    first.reset();
    slab.reset();  // and the client keeps its mapping, as one that does not let go

    auto next = all->take()->make_slab(SlabDirection::input, 4 * MiB).value();

    ASSERT_EQ(next->bytes().data(), address);
    write(*next, 2);
    EXPECT_EQ(client.ask("read 0"), "ok 1") << "it reads what another client wrote";
    EXPECT_EQ(client.ask("write 0 3"), "ok");
    EXPECT_EQ(read(*next), 2) << "it writes where another client reads";
}

TEST_F(Places, AreHadByOneChannelEachUntilItsLastSlabThereIsGone) {
    const auto all = places(2);
    Hold first = all->take();
    const Hold second = all->take();
    ASSERT_TRUE(first && second);
    EXPECT_EQ(all->take(), nullptr);
    auto input = first->make_slab(SlabDirection::input, 1).value();
    auto output = first->make_slab(SlabDirection::output, 1).value();
    EXPECT_EQ(first->make_slab(SlabDirection::input, 1).error().code, ErrorCode::resources_exhausted);

    input.reset();
    EXPECT_TRUE(first->make_slab(SlabDirection::input, 1))
        << "one that its client has returned makes room for the next";
    first.reset();
    EXPECT_EQ(report(*all, "free"), 0);
    output.reset();

    EXPECT_EQ(report(*all, "free"), 1);
    EXPECT_TRUE(all->take());
}

TEST_F(Places, AreNobodysBeforeTheirGraphsAreCapturedNorCapturedWhileSomebodyHasThem) {
    const auto all = GraphPlaces::reserve(gpu, 1, slab_bytes_max).value();
    EXPECT_EQ(all->take(), nullptr);
    {
        const auto memory = all->map_for_capture(0, {MiB, 0});
        ASSERT_TRUE(memory) << memory.error().text();
        EXPECT_FALSE(all->map_for_capture(0, {MiB, 0})) << "while another capture has it";
        all->open(0, {MiB, 0});
        EXPECT_EQ(all->take(), nullptr);
    }
    const Hold held = all->take();
    ASSERT_TRUE(held);
    EXPECT_EQ(all->map_for_capture(0, {MiB, 0}).error().code, ErrorCode::internal);
}

TEST_F(Places, GraphsThatNeedMoreThanAnySlabMayHaveAreRefused) {
    const auto all = GraphPlaces::reserve(gpu, 1, slab_bytes_max).value();
    const auto memory = all->map_for_capture(0, {MiB, slab_bytes_max + 1});
    ASSERT_FALSE(memory);
    EXPECT_EQ(memory.error().code, ErrorCode::input_invalid);
    EXPECT_THAT(memory.error().remedy, HasSubstr("channel.max"));
    const std::uint64_t more_than_half = slab_bytes_max / 2 + MiB;  // one channel has both
    EXPECT_EQ(all->map_for_capture(0, {more_than_half, more_than_half}).error().code, ErrorCode::input_invalid);
}

TEST_F(Places, ARequestIsAtOneOnlyWhereEveryTensorIsWhereTheGraphHasIt) {
    const auto all = places(2);
    const std::array<std::uint64_t, 2> sizes{256, 64};
    const GraphPlaces::Layout layout = GraphPlaces::lay_out(sizes);
    const Hold first = all->take();
    const Hold second = all->take();
    auto input = second->make_slab(SlabDirection::input, 1).value();
    auto output = second->make_slab(SlabDirection::output, 1).value();
    const auto view = [&](std::uint64_t offset, std::uint64_t bytes, bool on_device = true) {
        return TensorView{"x", wire::DType::uint8, {}, input->bytes().subspan(offset, bytes), on_device};
    };
    const auto found = [&](const std::array<TensorView, 2>& inputs) { return all->find(layout, inputs); };

    EXPECT_EQ(found({view(0, 256), view(256, 64)}), 1U);
    EXPECT_FALSE(found({view(0, 256), view(320, 64)}));
    EXPECT_FALSE(found({view(256, 256), view(0, 64)}));
    EXPECT_FALSE(found({view(0, 256), view(256, 64, false)}));
    EXPECT_FALSE(all->find(layout, std::array{view(0, 256)}));

    std::array<std::span<std::byte>, 2> rooms{output->bytes().subspan(0, 256), output->bytes().subspan(256, 64)};
    EXPECT_TRUE(all->matches(1, layout, rooms));
    EXPECT_FALSE(all->matches(0, layout, rooms)) << "another channel's";
    rooms[1] = output->bytes().subspan(512, 64);
    EXPECT_FALSE(all->matches(1, layout, rooms));

    const std::array<TensorView, 2> gone{view(0, 256), view(256, 64)};
    rooms[1] = output->bytes().subspan(256, 64);
    input.reset();
    output.reset();
    EXPECT_FALSE(found(gone)) << "no memory is there now";
    EXPECT_FALSE(all->matches(1, layout, rooms));
}

TEST_F(Places, OneThatCannotBeUnmappedIsNobodysAnyMore) {
    if (!test::is_fake_cuda()) GTEST_SKIP() << "only the fake driver errs on demand";
    const auto all = places(2);
    auto slab = all->take()->make_slab(SlabDirection::input, 1).value();
    const std::byte* const lost = slab->bytes().data();
    ::setenv("BULKHEAD_FAKE_CUDA_FAIL", "cuMemUnmap 999", 1);
    slab.reset();
    ::unsetenv("BULKHEAD_FAKE_CUDA_FAIL");

    EXPECT_EQ(report(*all, "count"), 1);
    const Hold other = all->take();
    ASSERT_TRUE(other);
    EXPECT_NE(other->make_slab(SlabDirection::input, 1).value()->bytes().data(), lost);
    EXPECT_EQ(all->take(), nullptr);
}

TEST_F(Places, AGpuThatSharesNothingByDescriptorHasNone) {
    if (!test::is_fake_cuda()) GTEST_SKIP() << "only the fake driver lacks on demand";
    ::setenv("BULKHEAD_FAKE_CUDA_LACKS", "103", 1);
    const auto refused = GraphPlaces::reserve(cuda::Gpu::open(0).value(), 1, slab_bytes_max);
    ::unsetenv("BULKHEAD_FAKE_CUDA_LACKS");
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::not_permitted);
    EXPECT_THAT(refused.error().remedy, HasSubstr("graph_slabs"));
}

/// The slabs of channels of one worker.
class PlacedSlabs : public Places {
protected:
    struct Offered {
        std::uint32_t id;
        std::byte* address;
        std::uint64_t size_bytes;
    };
    Offered add(ChannelSlabs& slabs, SlabDirection direction, std::uint64_t bytes,
                SlabKind kind = SlabKind::cuda_vmm) const {
        const Result<> added = slabs.add(direction, bytes, 1, kind);
        EXPECT_TRUE(added) << (added ? "" : added.error().text());
        const channel::SlabOffer offer = slabs.take_offers().back().message;
        channel::Tensor first_byte;
        first_byte.lease.slab_id = offer.slab_id;
        first_byte.lease.size_bytes = 1;
        std::byte* const address = direction == SlabDirection::input
                                       ? slabs.input(first_byte).value().bytes.data()
                                       : slabs.allocate_output(1, kind).value().bytes.data();
        return {offer.slab_id, address, offer.size_bytes};
    }
    std::shared_ptr<ChannelSlabs> channel(const std::shared_ptr<GraphPlaces>& all) const {
        auto slabs = std::make_shared<ChannelSlabs>("test:", limits, budget);
        slabs->use_gpu(gpu, all);
        return slabs;
    }
    config::ChannelLimits limits = [] {
        config::ChannelLimits some;
        some.bytes_max = slab_bytes_max;
        return some;
    }();
    std::shared_ptr<SlabBudget> budget = std::make_shared<SlabBudget>(1 << 30);
};

TEST_F(PlacedSlabs, AreAsLongAsTheGraphsNeedAndCountToTheWorkersBudget) {
    const auto all = places(1, {6 * MiB, 4 * MiB});
    EXPECT_EQ(budget->used_bytes(), 0U);
    auto one = channel(all);

    const Offered input = add(*one, SlabDirection::input, 1);
    const Offered output = add(*one, SlabDirection::output, 8 * MiB);

    EXPECT_EQ(input.address, all->address(0, SlabDirection::input));
    EXPECT_EQ(output.address, all->address(0, SlabDirection::output));
    EXPECT_GE(input.size_bytes, 6 * MiB);
    EXPECT_GE(output.size_bytes, 8 * MiB);
    EXPECT_EQ(budget->used_bytes(), input.size_bytes + output.size_bytes);
    one.reset();
    EXPECT_EQ(budget->used_bytes(), 0U);
    EXPECT_EQ(report(*all, "free"), 1);
}

TEST_F(PlacedSlabs, TheChannelThatFindsNoPlaceGetsSlabsElsewhere) {
    const auto all = places(1);
    auto one = channel(all);
    const Offered first = add(*one, SlabDirection::input, 1);
    const auto other = channel(all);

    EXPECT_NE(add(*other, SlabDirection::input, 1).address, first.address);
    EXPECT_NE(add(*one, SlabDirection::input, 1).address, first.address) << "a second slab of the channel at the place";
    one.reset();
    EXPECT_EQ(add(*other, SlabDirection::input, 1).address, first.address) << "once it is free";
}

TEST_F(PlacedSlabs, WhatTheGraphsNeedBeyondTheChannelsBoundIsNotForcedUponIt) {
    const auto all = places(1, {32 * MiB, 1});
    limits.bytes_max = 8 * MiB;
    const auto one = channel(all);
    const Offered input = add(*one, SlabDirection::input, 2 * MiB);
    EXPECT_NE(input.address, all->address(0, SlabDirection::input));
    EXPECT_LT(input.size_bytes, 8 * MiB);
}

/// With a slab of one direction there nothing would be computed in place, and the other direction has less room.
TEST_F(PlacedSlabs, APlaceIsTakenOnlyWhereBothDirectionsFit) {
    const auto all = places(1, {10 * MiB, 10 * MiB});
    limits.bytes_max = 16 * MiB;
    const auto one = channel(all);

    EXPECT_NE(add(*one, SlabDirection::input, 1).address, all->address(0, SlabDirection::input));
    EXPECT_EQ(report(*all, "free"), 1);
    add(*one, SlabDirection::output, 6 * MiB);
}

TEST_F(PlacedSlabs, MemoryThatCannotBeClearedIsNobodys) {
    if (!test::is_fake_cuda()) GTEST_SKIP() << "only the fake driver errs on demand";
    const auto all = places(1);
    const auto one = channel(all);
    ::setenv("BULKHEAD_FAKE_CUDA_FAIL", "cuMemsetD8Async 999", 1);
    for (const SlabKind kind : {SlabKind::cuda_vmm, SlabKind::cuda_ipc}) {
        const Result<> refused = one->add(SlabDirection::input, 1, 1, kind);
        ASSERT_FALSE(refused) << "it may show what another client left there";
        EXPECT_THAT(refused.error().attempt, HasSubstr("cuMemsetD8Async"));
    }
    EXPECT_EQ(budget->used_bytes(), 0U);
    EXPECT_EQ(report(*all, "free"), 1);
}

TEST_F(PlacedSlabs, LegacySlabsTakeNoPlace) {
    const auto all = places(1);
    const auto one = channel(all);
    add(*one, SlabDirection::input, 1, SlabKind::cuda_ipc);
    EXPECT_EQ(report(*all, "free"), 1);
}

TEST_F(PlacedSlabs, ASlabThatIsReturnedMakesRoomForTheNextOne) {
    NoModel model;
    const auto all = places(1);
    const auto one = channel(all);
    const Offered input = add(*one, SlabDirection::input, 1);
    ASSERT_TRUE(one->give_back(input.id));
    EXPECT_EQ(report(*all, "free"), 0) << "requests may still read it";

    one->drop(one->take_returned([](std::uint32_t) { return false; }), model);

    EXPECT_EQ(report(*all, "free"), 1);
    EXPECT_EQ(add(*channel(all), SlabDirection::input, 1).address, input.address);
}

}  // namespace
}  // namespace bulkhead::worker
