/// Device memory and events between two processes, on a GPU or on the fake driver
/// ($BULKHEAD_LIBCUDA).

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ipc/cuda/interprocess_event.h"
#include "ipc/cuda/legacy_slab.h"
#include "ipc/cuda/vmm_slab.h"
#include "tests/gpu/slabs/cuda_peer.h"
#include "tests/gpu/slabs/on_gpu.h"
#include "tests/support/open_descriptors.h"

namespace bulkhead {
namespace {

using cuda::Access;
using cuda::Gpu;
using cuda::InterprocessEvent;
using cuda::LegacySlab;
using cuda::VmmSlab;
using test::CudaPeer;
using test::open_descriptors;
using testing::HasSubstr;
using testing::StartsWith;

constexpr std::uint64_t slab_bytes = 4u << 20;

class GpuSlabs : public test::OnGpu {
protected:
    void write(cuda::CUdeviceptr place, unsigned char value) const {
        const Gpu::Current current{*gpu};
        const auto host = reinterpret_cast<cuda::CUdeviceptr>(&value);
        ASSERT_EQ(gpu->driver().cuMemcpyAsync(place, host, 1, stream), cuda::CUDA_SUCCESS);
        ASSERT_EQ(gpu->driver().cuStreamSynchronize(stream), cuda::CUDA_SUCCESS);
    }
    [[nodiscard]] int read(cuda::CUdeviceptr place) const {
        unsigned char value = 0;
        const Gpu::Current current{*gpu};
        const auto host = reinterpret_cast<cuda::CUdeviceptr>(&value);
        EXPECT_EQ(gpu->driver().cuMemcpyAsync(host, place, 1, stream), cuda::CUDA_SUCCESS);
        EXPECT_EQ(gpu->driver().cuStreamSynchronize(stream), cuda::CUDA_SUCCESS);
        return value;
    }
    [[nodiscard]] std::string import_command(const char* access) const {
        return fmt::format("vmm import {} {}", slab_bytes, access);
    }
};

/// Only the fake errs on demand.
class GpuSlabFaults : public GpuSlabs {
protected:
    void SetUp() override {
        if (!test::is_fake_cuda()) GTEST_SKIP() << "only the fake driver errs on demand";
        GpuSlabs::SetUp();
    }
    static void fail(const std::string& rule) { ::setenv("BULKHEAD_FAKE_CUDA_FAIL", rule.c_str(), 1); }
};

TEST_F(GpuSlabs, BytesWrittenByTheImporterOfAVmmSlabAreReadByItsCreatorAndBackAndItMayImportItAgain) {
    auto slab = VmmSlab::create(gpu, slab_bytes).value();
    CudaPeer peer;
    ASSERT_EQ(peer.ask(import_command("rw"), slab.export_fd()->get()), "ok");

    EXPECT_EQ(peer.ask("write 77 41"), "ok");
    EXPECT_EQ(read(slab.pointer() + 77), 41);
    write(slab.pointer() + slab_bytes - 1, 42);
    EXPECT_EQ(peer.ask(fmt::format("read {}", slab_bytes - 1)), "ok 42");
    for (int i = 0; i < 2; ++i) {
        ASSERT_EQ(peer.ask("drop"), "ok");
        ASSERT_EQ(peer.ask(import_command("rw"), slab.export_fd()->get()), "ok") << "once more";
        ASSERT_EQ(peer.ask("write 0 5"), "ok");
    }
}

TEST_F(GpuSlabs, AReadOnlyImportReadsAndCannotWrite) {
    auto slab = VmmSlab::create(gpu, slab_bytes).value();
    write(slab.pointer() + 5, 7);
    CudaPeer peer;
    ASSERT_EQ(peer.ask(import_command("ro"), slab.export_fd()->get()), "ok");
    EXPECT_EQ(peer.ask("read 5"), "ok 7");

    EXPECT_NE(peer.ask("write 5 8"), "ok");  // may cost the peer its context
    EXPECT_EQ(read(slab.pointer() + 5), 7);
}

TEST_F(GpuSlabs, SizesAreRoundedUpToWhatTheDeviceAllocatesIn) {
    auto slab = VmmSlab::create(gpu, 1).value();
    EXPECT_GE(slab.size_bytes(), 4096U);
    EXPECT_EQ(VmmSlab::create(gpu, 0).error().code, ErrorCode::input_invalid);
    EXPECT_EQ(VmmSlab::create(gpu, ~0ULL).error().code, ErrorCode::input_invalid);
    EXPECT_EQ(LegacySlab::create(gpu, 0).error().code, ErrorCode::input_invalid);
}

TEST_F(GpuSlabs, AVmmSlabOutlivesTheDeathOfItsCreator) {
    CudaPeer creator;
    ASSERT_EQ(creator.ask(fmt::format("vmm create {}", slab_bytes)), "ok");
    const UniqueFd fd = creator.take_fd();
    ASSERT_EQ(creator.ask("write 9 90"), "ok");
    auto imported = VmmSlab::import(gpu, fd.get(), slab_bytes, Access::read_only).value();

    creator.kill();

    EXPECT_EQ(read(imported.pointer() + 9), 90);
    // The descriptor alone keeps it as well: one more importer after the death.
    CudaPeer late;
    ASSERT_EQ(late.ask(import_command("ro"), fd.get()), "ok");
    EXPECT_EQ(late.ask("read 9"), "ok 90");
}

TEST_F(GpuSlabs, AnImporterKilledWhileItMapsLeavesTheCreatorWhole) {
    auto slab = VmmSlab::create(gpu, slab_bytes).value();
    CudaPeer peer;
    ASSERT_EQ(peer.ask(import_command("rw"), slab.export_fd()->get()), "ok");
    ASSERT_EQ(peer.ask("write 1 11"), "ok");

    peer.kill();

    EXPECT_EQ(read(slab.pointer() + 1), 11);
    write(slab.pointer() + 1, 12);
    EXPECT_EQ(read(slab.pointer() + 1), 12);
}

TEST_F(GpuSlabs, CreatingExportingAndDroppingLeavesNoDescriptorBehind) {
    const auto cycle = [&] {
        auto slab = VmmSlab::create(gpu, slab_bytes);
        ASSERT_TRUE(slab) << slab.error().text();
        ASSERT_TRUE(slab->export_fd());
        auto legacy = LegacySlab::create(gpu, slab_bytes).value();
    };
    cycle();  // what the driver opens once, for itself
    const std::size_t before = open_descriptors();
    for (int i = 0; i < 20; ++i) cycle();
    EXPECT_EQ(open_descriptors(), before);
}

TEST_F(GpuSlabs, WhatIsNoDeviceMemoryOrSmallerThanItsOfferClaimsIsRefused) {
    const UniqueFd memfd{::memfd_create("no device memory", MFD_CLOEXEC)};
    ASSERT_EQ(::ftruncate(memfd.get(), slab_bytes), 0);
    EXPECT_FALSE(VmmSlab::import(gpu, memfd.get(), slab_bytes, Access::read_write));
    EXPECT_FALSE(VmmSlab::import(gpu, -1, slab_bytes, Access::read_write));

    auto slab = VmmSlab::create(gpu, slab_bytes).value();
    CudaPeer peer;
    EXPECT_NE(peer.ask(fmt::format("vmm import {} rw", 2 * slab.size_bytes()), slab.export_fd()->get()), "ok");
    EXPECT_EQ(peer.ask(import_command("rw"), slab.export_fd()->get()), "ok") << "and hurts nobody";
}

TEST_F(GpuSlabs, ALegacySlabIsSharedByItsHandleAlone) {
    auto slab = LegacySlab::create(gpu, slab_bytes).value();
    const auto handle = slab.handle().value();
    CudaPeer peer;
    ASSERT_EQ(peer.ask(fmt::format("legacy import {} {}", slab_bytes, test::to_text(handle))), "ok");

    EXPECT_EQ(peer.ask("write 123 45"), "ok");
    EXPECT_EQ(read(slab.pointer() + 123), 45);
    EXPECT_EQ(peer.ask("drop"), "ok");
    EXPECT_EQ(peer.ask(fmt::format("legacy import {} {}", slab_bytes, test::to_text(handle))), "ok");
    EXPECT_FALSE(LegacySlab::import(gpu, handle, slab_bytes)) << "by the process that made it";
}

// What an importer sees of legacy memory whose exporter died is not defined, so nobody looks: it
// only must not hurt.
TEST_F(GpuSlabs, AnImporterOfALegacySlabSurvivesTheDeathOfItsCreator) {
    CudaPeer creator;
    const std::string made = creator.ask(fmt::format("legacy create {}", slab_bytes));
    ASSERT_THAT(made, StartsWith("ok "));
    auto imported = LegacySlab::import(gpu, test::handle_from(made.substr(3)), slab_bytes).value();

    creator.kill();

    { const LegacySlab dropped = std::move(imported); }
    auto other = VmmSlab::create(gpu, slab_bytes).value();
    write(other.pointer(), 3);
    EXPECT_EQ(read(other.pointer()), 3);
}

TEST_F(GpuSlabs, Fault12AStaleHandleOfADeadExporterIsAnErrorThatHurtsNobody) {
    std::string memory, event;
    {
        CudaPeer dead;
        memory = dead.ask(fmt::format("legacy create {}", slab_bytes));
        event = dead.ask("event create");
        ASSERT_THAT(memory, StartsWith("ok "));
        ASSERT_THAT(event, StartsWith("ok "));
    }

    const auto slab = LegacySlab::import(gpu, test::handle_from(memory.substr(3)), slab_bytes);
    const auto opened = InterprocessEvent::import(gpu, test::handle_from(event.substr(3)));

    ASSERT_FALSE(slab);
    EXPECT_THAT(slab.error().attempt, HasSubstr("cuIpcOpenMemHandle"));
    EXPECT_THAT(slab.error().attempt, HasSubstr(cuda::to_string(gpu->uuid())));
    ASSERT_TRUE(opened) << opened.error().text();  // driver 580 opens it: what nobody has recorded
                                                   // holds no stream
    ASSERT_TRUE(opened->make_wait(stream));
    synchronize();
    auto other = VmmSlab::create(gpu, slab_bytes).value();
    write(other.pointer(), 3);
    EXPECT_EQ(read(other.pointer()), 3);
}

TEST_F(GpuSlabs, Fault12AWrongGpuUuidIsNamedInTheError) {
    wire::GpuUuid nobodys{};
    nobodys.fill(0xab);
    const auto opened = Gpu::open(nobodys);
    ASSERT_FALSE(opened);
    EXPECT_EQ(opened.error().code, ErrorCode::input_invalid);
    EXPECT_THAT(opened.error().attempt, HasSubstr("GPU-abababab-abab-abab-abab-abababababab"));
    EXPECT_THAT(opened.error().remedy, HasSubstr("CUDA_VISIBLE_DEVICES"));

    const auto same = Gpu::open(gpu->uuid()).value();
    EXPECT_EQ(same->device(), gpu->device());
}

TEST_F(GpuSlabs, AStreamOfAnotherProcessWaitsForTheWorkBeforeARecordedEvent) {
    auto slab = VmmSlab::create(gpu, slab_bytes).value();
    write(slab.pointer(), 1);
    // On the GPU: a copy to pageable memory would hold up this thread.
    auto seen = VmmSlab::create(gpu, slab_bytes).value();
    auto done = InterprocessEvent::create(gpu);
    ASSERT_TRUE(done) << done.error().text();
    CudaPeer peer;
    ASSERT_EQ(peer.ask(import_command("rw"), slab.export_fd()->get()), "ok");
    ASSERT_EQ(peer.ask("event import " + test::to_text(done->handle().value())), "ok");

    // The peer's stream is held before its write: the write and the event behind it are queued, and
    // have not happened.
    ASSERT_EQ(peer.ask("stream block"), "ok");
    ASSERT_EQ(peer.ask("fill 0 2"), "ok");
    ASSERT_EQ(peer.ask("event record"), "ok");
    ASSERT_TRUE(done->make_wait(stream));
    {
        const Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuMemcpyAsync(seen.pointer(), slab.pointer(), 1, stream), cuda::CUDA_SUCCESS);
    }
    // Nobody was held up by all this: the queues are full, the hosts go on.
    ASSERT_EQ(peer.ask("stream unblock"), "ok");
    EXPECT_EQ(read(seen.pointer()), 2);
}

TEST_F(GpuSlabs, ALaterRecordingDoesNotEndTheWaitForAnEarlierOne) {
    auto event = InterprocessEvent::create(gpu).value();
    CudaPeer peer;
    ASSERT_EQ(peer.ask("event import " + test::to_text(event.handle().value())), "ok");
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(event.record(stream)) << "before the other side has waited";
    EXPECT_EQ(peer.ask("event wait"), "ok");
    EXPECT_EQ(peer.ask("stream synchronize"), "ok");

    ASSERT_EQ(peer.ask("stream block"), "ok");
    ASSERT_EQ(peer.ask("event record"), "ok");
    ASSERT_TRUE(event.make_wait(stream));
    std::atomic<bool> passed = false;
    cuda::CUstream other = nullptr;
    {
        const Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuLaunchHostFunc(
                      stream, [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; }, &passed),
                  cuda::CUDA_SUCCESS);
        ASSERT_EQ(gpu->driver().cuStreamCreate(&other, cuda::CU_STREAM_NON_BLOCKING), cuda::CUDA_SUCCESS);
        ASSERT_TRUE(event.record(other));
        ASSERT_EQ(gpu->driver().cuStreamSynchronize(other), cuda::CUDA_SUCCESS);
        EXPECT_EQ(gpu->driver().cuStreamDestroy(other), cuda::CUDA_SUCCESS);
    }
    EXPECT_FALSE(passed);

    ASSERT_EQ(peer.ask("stream unblock"), "ok");
    synchronize();
    EXPECT_TRUE(passed);
}

TEST_F(GpuSlabFaults, EachRefusalOfTheDriverIsOneErrorThatNamesCallAndCode) {
    const std::size_t before = [&] {
        { auto warm = VmmSlab::create(gpu, slab_bytes); }
        return open_descriptors();
    }();
    for (const char* call :
         {"cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
        fail(fmt::format("{} 2", call));
        const auto slab = VmmSlab::create(gpu, slab_bytes);
        ASSERT_FALSE(slab) << call;
        EXPECT_THAT(slab.error().attempt, HasSubstr(fmt::format("{}: CUDA_ERROR_OUT_OF_MEMORY (2", call)));
        EXPECT_EQ(slab.error().code, ErrorCode::out_of_memory);
        EXPECT_FALSE(slab.error().remedy.empty());
    }
    fail("");
    EXPECT_TRUE(VmmSlab::create(gpu, slab_bytes));
    EXPECT_EQ(open_descriptors(), before) << "what was made before the refusal is taken back";
}

TEST_F(GpuSlabFaults, AnImporterInAnotherContainerIsToldThatItIsNotPermitted) {
    auto slab = VmmSlab::create(gpu, slab_bytes).value();
    CudaPeer elsewhere{{{"BULKHEAD_FAKE_CUDA_FAIL", "cuMemImportFromShareableHandle 304 after 1"}}};
    ASSERT_EQ(elsewhere.ask(import_command("rw"), slab.export_fd()->get()), "ok");
    const std::string refused = elsewhere.ask(import_command("rw"), slab.export_fd()->get());
    EXPECT_THAT(refused, StartsWith("not_permitted: importing a slab"));
    EXPECT_THAT(refused, HasSubstr("CUDA_ERROR_OPERATING_SYSTEM (304"));
}

TEST_F(GpuSlabFaults, Fault12AnotherGpusMemoryIsRefusedByWhoDoesNotSeeThatGpu) {
    auto slab = VmmSlab::create(gpu, slab_bytes).value();
    auto legacy = LegacySlab::create(gpu, slab_bytes).value();
    CudaPeer other{{{"BULKHEAD_FAKE_CUDA_GPUS", "GPU-0badf00d-0000-4000-8000-000000000002"}}};
    EXPECT_THAT(other.ask(import_command("rw"), slab.export_fd()->get()), HasSubstr("CUDA_ERROR_INVALID_DEVICE"));
    EXPECT_THAT(other.ask(fmt::format("legacy import {} {}", slab_bytes, test::to_text(legacy.handle().value()))),
                HasSubstr("CUDA_ERROR_INVALID_DEVICE"));
}

TEST_F(GpuSlabFaults, AGpuThatCannotShareOffersNoKindOfSlab) {
    ::setenv("BULKHEAD_FAKE_CUDA_LACKS", "103", 1);
    EXPECT_EQ((*Gpu::open(0))->features(), std::uint64_t{wire::feature_cuda_ipc});
    ::setenv("BULKHEAD_FAKE_CUDA_LACKS", "125", 1);
    EXPECT_EQ((*Gpu::open(0))->features(), 0U) << "without events nothing can be handed over";
    ::unsetenv("BULKHEAD_FAKE_CUDA_LACKS");
    EXPECT_EQ((*Gpu::open(0))->features(), std::uint64_t{wire::feature_cuda_ipc | wire::feature_cuda_vmm});
}

TEST_F(GpuSlabFaults, AMachineWithoutAVisibleGpuSaysSoOnce) {
    CudaPeer blind{{{"CUDA_VISIBLE_DEVICES", ""}}};
    const std::string answer = blind.ask("stream synchronize");
    EXPECT_THAT(answer, StartsWith("load_failed: opening NVIDIA's driver"));
    EXPECT_THAT(answer, HasSubstr("CUDA_ERROR_NO_DEVICE"));
    CudaPeer without{{{"BULKHEAD_LIBCUDA", "/nowhere/libcuda.so.1"}}};
    EXPECT_THAT(without.ask("stream synchronize"), HasSubstr("use host slabs"));
}

}  // namespace
}  // namespace bulkhead
