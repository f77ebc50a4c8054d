#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "tests/fakes/fake_cuda/fake.h"

namespace {

/// In a memfd, so that every process that opens the event sees it move.
struct Counters {
    std::atomic<std::uint32_t> recorded;
    std::atomic<std::uint32_t> reached;  ///< a futex word

    void reach(std::uint32_t recording) {
        // Streams may reach an event out of the order in which it was recorded: the latest counts.
        std::uint32_t before = reached.load();
        while (static_cast<std::int32_t>(recording - before) > 0 && !reached.compare_exchange_weak(before, recording)) {
        }
        ::syscall(SYS_futex, &reached, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
    [[nodiscard]] bool has_reached(std::uint32_t recording) const {
        return static_cast<std::int32_t>(reached.load() - recording) >= 0;
    }
    void wait_for(std::uint32_t recording) {
        for (std::uint32_t now = reached.load(); static_cast<std::int32_t>(now - recording) < 0; now = reached.load())
            ::syscall(SYS_futex, &reached, FUTEX_WAIT, now, nullptr, nullptr, 0);
    }
};

std::shared_ptr<Counters> map_counters(int fd) {
    void* const page = ::mmap(nullptr, sizeof(Counters), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) return nullptr;
    return {static_cast<Counters*>(page), [](Counters* counters) { ::munmap(counters, sizeof(Counters)); }};
}

}  // namespace

struct bulkhead::cuda::CUevent_st {
    int fd = -1;
    int device = 0;
    bool interprocess = false;
    bool imported = false;
    std::shared_ptr<Counters> counters;  ///< shared with what is queued
    ~CUevent_st() { ::close(fd); }
};

using namespace fake_cuda;

FAKE_CUDA_EXPORT CUresult cuEventCreate(CUevent* event, unsigned flags) {
    FAKE_CUDA_NEED_CONTEXT();
    const bool interprocess = (flags & CU_EVENT_INTERPROCESS) != 0;
    if (interprocess && (flags & CU_EVENT_DISABLE_TIMING) == 0) return CUDA_ERROR_INVALID_VALUE;
    auto made = std::make_unique<CUevent_st>();
    made->fd = ::memfd_create("fake-cuda-event", MFD_CLOEXEC);
    if (made->fd < 0 || ::ftruncate(made->fd, sizeof(Counters)) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
    made->device = current()->device;
    made->interprocess = interprocess;
    made->counters = map_counters(made->fd);
    if (!made->counters) return CUDA_ERROR_OPERATING_SYSTEM;
    *event = made.release();
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuEventDestroy_v2(CUevent event) {
    FAKE_CUDA_ENTER();
    delete event;
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    FAKE_CUDA_NEED_CONTEXT();
    const std::uint32_t recording = ++event->counters->recorded;
    const bool in_order = std::getenv("BULKHEAD_FAKE_CUDA_EVENTS_IN_ORDER") != nullptr;
    return enqueue(stream, [counters = event->counters, recording, in_order] {
        if (in_order) counters->wait_for(recording - 1);
        counters->reach(recording);
    });
}

FAKE_CUDA_EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    FAKE_CUDA_NEED_CONTEXT();
    const std::uint32_t latest = event->counters->recorded;
    if (const auto lock = lock_if_waits_block()) {
        if (!event->counters->has_reached(latest)) std::fputs("fake driver: a wait blocks\n", stderr);
        event->counters->wait_for(latest);
    }
    return enqueue(stream, [counters = event->counters, latest] { counters->wait_for(latest); });
}

FAKE_CUDA_EXPORT CUresult cuEventQuery(CUevent event) {
    FAKE_CUDA_NEED_CONTEXT();
    return event->counters->has_reached(event->counters->recorded) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

FAKE_CUDA_EXPORT CUresult cuEventSynchronize(CUevent event) {
    FAKE_CUDA_NEED_CONTEXT();
    event->counters->wait_for(event->counters->recorded);
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuIpcGetEventHandle(CUipcEventHandle* handle, CUevent event) {
    FAKE_CUDA_NEED_CONTEXT();
    if (!event->interprocess || event->imported) return CUDA_ERROR_INVALID_HANDLE;
    *handle = std::bit_cast<CUipcEventHandle>(name_memfd("fakeevnt", event->fd, sizeof(Counters), event->device));
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuIpcOpenEventHandle(CUevent* event, CUipcEventHandle handle) {
    FAKE_CUDA_NEED_CONTEXT();
    auto opened = std::make_unique<CUevent_st>();
    const CUresult found = open_memfd("fakeevnt", std::bit_cast<IpcName>(handle), opened->fd);
    if (found != CUDA_SUCCESS) return found;
    opened->device = current()->device;
    opened->imported = true;
    opened->counters = map_counters(opened->fd);
    if (!opened->counters) return CUDA_ERROR_OPERATING_SYSTEM;
    *event = opened.release();
    return CUDA_SUCCESS;
}
