/// A descriptor that is said to be a slab, and leases that are said to lie in it: what is adopted
/// cannot shrink under a reader, what is placed lies inside, and what is given back was leased.
/// Rings that a client writes, and the page that a worker shares with the supervisor.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <map>

#include "ipc/base/packet.h"
#include "ipc/channel/tensor_layout.h"
#include "ipc/ring/ring.h"
#include "ipc/slab/host_slab.h"
#include "ipc/slab/slab_allocator.h"
#include "supervisor/worker_link/death_watch.h"
#include "tests/fuzz/fuzz_input.h"

namespace {

using namespace bulkhead;
using fuzz::Input;

constexpr std::uint32_t size_mask = (1u << 16) - 1;  ///< of memfds: every one is made in
                                                     ///< vain but a few

UniqueFd make_descriptor(std::uint8_t kind, std::uint64_t size_bytes, int seals) {
    switch (kind % 8) {
    case 0: return UniqueFd{::open("/dev/zero", O_RDWR | O_CLOEXEC)};
    case 1: return UniqueFd{::open("/proc/self/exe", O_RDONLY | O_CLOEXEC)};
    case 2: {
        std::array<int, 2> ends{};
        if (::pipe2(ends.data(), O_CLOEXEC) != 0) return {};
        const UniqueFd writing{ends[1]};
        return UniqueFd{ends[0]};
    }
    case 3: return UniqueFd{::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
    default: break;
    }
    UniqueFd memfd{::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    if (::ftruncate(memfd.get(), static_cast<off_t>(size_bytes)) != 0) return {};
    ::fcntl(memfd.get(), F_ADD_SEALS, seals & 0x1f);
    return memfd;
}

void adopt(Input& input) {
    const auto kind = input.take<std::uint8_t>();
    const int seals = input.take<std::uint8_t>();
    const std::uint64_t size_bytes = input.take<std::uint32_t>() & size_mask;
    const auto direction = (input.take<std::uint8_t>() & 1) != 0 ? wire::SlabDirection::output  //
                                                                 : wire::SlabDirection::input;
    const std::uint64_t claimed = input.take<std::uint8_t>() != 0 ? input.take<std::uint64_t>() : size_bytes;
    UniqueFd descriptor = make_descriptor(kind, size_bytes, seals);
    if (!descriptor) return;
    const int watched = ::dup(descriptor.get());
    const UniqueFd other_end{watched};  // the peer keeps its own

    const auto slab = HostSlab::adopt(std::move(descriptor), claimed, direction);
    if (!slab) {
        BULKHEAD_PROMISE(!slab.error().attempt.empty());
        return;
    }
    BULKHEAD_PROMISE(slab->size_bytes() == size_bytes && claimed == size_bytes && size_bytes > 0);
    BULKHEAD_PROMISE(::ftruncate(watched, 0) != 0 && errno == EPERM);
    volatile std::byte last = slab->bytes().back();
    static_cast<void>(last);
    if (direction == wire::SlabDirection::input) {
        slab->bytes().front() = std::byte{1};
    } else {
        void* const writable = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, watched, 0);
        BULKHEAD_PROMISE(writable == MAP_FAILED);
    }
    while (!input.empty()) {
        const auto lease = input.take<wire::LeaseRef>();
        if (!check_placement(lease, size_bytes)) continue;
        BULKHEAD_PROMISE(lease.offset_bytes % wire::tensor_alignment == 0);
        BULKHEAD_PROMISE(lease.offset_bytes <= size_bytes && lease.size_bytes <= size_bytes - lease.offset_bytes);
    }
}

/// Leases against a plain model of them.
void allocate(Input& input) {
    const std::uint64_t size_bytes = input.take<std::uint32_t>() & size_mask;
    SlabAllocator allocator{size_bytes};
    std::map<std::uint64_t, SlabAllocator::Block> leased;
    while (!input.empty()) {
        const auto action = input.take<std::uint8_t>();
        if (action % 3 == 0) {
            const auto block = allocator.allocate(input.take<std::uint64_t>() & (action & 4 ? ~0ULL : size_mask));
            if (!block) continue;
            BULKHEAD_PROMISE(block->offset_bytes % wire::tensor_alignment == 0);
            BULKHEAD_PROMISE(block->size_bytes <= size_bytes && block->offset_bytes <= size_bytes - block->size_bytes);
            const auto [place, is_new] = leased.emplace(block->offset_bytes, *block);
            BULKHEAD_PROMISE(is_new);
            if (const auto after = std::next(place); after != leased.end())
                BULKHEAD_PROMISE(block->offset_bytes + block->size_bytes <= after->first);
            if (place != leased.begin()) {
                const auto& before = std::prev(place)->second;
                BULKHEAD_PROMISE(before.offset_bytes + before.size_bytes <= block->offset_bytes);
            }
        } else if (action % 3 == 1 && !leased.empty()) {
            const auto chosen = std::next(leased.begin(), static_cast<std::ptrdiff_t>(action) %
                                                              static_cast<std::ptrdiff_t>(leased.size()));
            BULKHEAD_PROMISE(allocator.release(chosen->second).has_value());
            BULKHEAD_PROMISE(!allocator.release(chosen->second).has_value());
            leased.erase(chosen);
        } else {
            const auto block = input.take<SlabAllocator::Block>();
            const auto found = leased.find(block.offset_bytes);
            const bool is_leased = found != leased.end() && found->second == block;
            BULKHEAD_PROMISE(allocator.is_leased(block) == is_leased);
            if (!is_leased) BULKHEAD_PROMISE(!allocator.release(block).has_value());
        }
        BULKHEAD_PROMISE(allocator.leases() == leased.size());
    }
}

/// A worker's side of two rings, whose memory the client fills as it likes.
void use_ring(Input& input) {
    static std::array<std::byte, packet_bytes_max> buffer;
    static_cast<void>(input.take<std::uint8_t>());  // has lost its meaning; inputs of the
                                                    // corpus have it
    auto rings = RingEnd::make(ring::cells_min, ring::cells_min, "fuzz");
    if (!rings) return;
    const std::uint64_t size_bytes = (*rings)->offer().size_bytes;
    const std::size_t carried = (*rings)->packet_bytes_max();
    const int memory = (*rings)->offer_fds()[0];
    const auto put = [&](std::uint64_t at, std::span<const std::byte> bytes) {
        [[maybe_unused]] const auto written = ::pwrite(memory, bytes.data(), bytes.size(), static_cast<off_t>(at));
    };
    std::uint64_t cell = 0;  // the next that the client publishes, when it is honest
    while (!input.empty()) {
        const auto action = input.take<std::uint8_t>();
        switch (action % 6) {
        case 0: {  // a packet, of the size it says or another, wholly published or not
            const auto payload = input.take_piece();
            const std::uint64_t count = 1 + payload.size() / ring::payload_bytes;
            for (std::uint64_t i = std::min<std::uint64_t>(count, ring::cells_min); i-- > 0;) {
                const std::uint64_t at = ring::header_bytes + (cell + i) % ring::cells_min * 64;
                const std::uint64_t sequence = cell + i + 1;
                put(at + 8, payload.subspan(i * ring::payload_bytes)
                                .first(std::min(ring::payload_bytes, payload.size() - i * ring::payload_bytes)));
                put(at, std::as_bytes(std::span{&sequence, 1}));
            }
            cell += count;
            break;
        }
        case 1: put(input.take<std::uint16_t>() % size_bytes, input.take_bytes(action / 4)); break;
        case 2: static_cast<void>((*rings)->prepare_to_sleep(action & 64)); break;
        case 3: {
            const auto bytes = input.take_bytes(carried);
            if (bytes.size() < sizeof(wire::Header)) break;
            if (const auto room = (*rings)->has_room(bytes.size()); room && *room) {
                (*rings)->write(bytes);
                (*rings)->announce();
            }
            break;
        }
        default: {
            const auto size = (*rings)->read(buffer);
            if (!size) {
                BULKHEAD_PROMISE(size.error().code == ErrorCode::protocol_violation);
                return;  // the channel ends
            }
            if (*size == 0) break;
            wire::Header header;
            std::memcpy(&header, buffer.data(), sizeof header);
            BULKHEAD_PROMISE(*size >= sizeof header && *size <= carried && header.size_bytes == *size);
        }
        }
    }
}

/// A worker's page, while its owner writes to it.
void view_page(Input& input) {
    const bool sealed = (input.take<std::uint8_t>() & 1) != 0;
    const auto content = input.take_bytes(worker_page::page_bytes);
    const UniqueFd memfd{::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    const std::uint64_t size_bytes = sealed ? worker_page::page_bytes : content.size();
    if (::ftruncate(memfd.get(), static_cast<off_t>(size_bytes)) != 0) return;
    [[maybe_unused]] const auto written = ::pwrite(memfd.get(), content.data(), content.size(), 0);
    if (sealed) ::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);

    const auto view = supervisor::WorkerPageView::map(memfd);
    if (!view) return;
    BULKHEAD_PROMISE(sealed);
    for (int turn = 0; turn < 2; ++turn) {
        const std::string request = (*view)->request();
        BULKHEAD_PROMISE(request.size() <= 8 * worker_page::request_text_bytes);
        for (const char c : request) BULKHEAD_PROMISE(static_cast<unsigned char>(c) >= 0x20);
        static_cast<void>((*view)->steps() + (*view)->running_since_ns() + (*view)->word());
        static_cast<void>((*view)->owner_died());
        const auto more = input.take_bytes(64);
        [[maybe_unused]] const auto again =
            ::pwrite(memfd.get(), more.data(), more.size(), static_cast<off_t>(input.take<std::uint16_t>() % 4000));
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input{data, size};
    switch (input.take<std::uint8_t>() % 4) {
    case 0: adopt(input); break;
    case 1: allocate(input); break;
    case 2: view_page(input); break;
    default: use_ring(input); break;
    }
    return 0;
}
