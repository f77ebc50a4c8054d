#include "ipc/ring/ring.h"

#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "ipc/base/packet.h"

// GCC's thread sanitizer does not support fences. It needs none here: these order only flags and
// positions, which are atomic, and no plain memory.
#pragma GCC diagnostic ignored "-Wtsan"

namespace bulkhead {
namespace {

using namespace ring;

constexpr std::size_t cells_of(std::size_t packet_bytes) noexcept {
    return (packet_bytes + payload_bytes - 1) / payload_bytes;
}

Error lies(std::string attempt) {
    return {ErrorCode::protocol_violation, std::move(attempt), "write the ring as docs/channel.md says"};
}

/// One side stores a packet (or its progress), fences, and loads the peer's `asleep`; the other
/// stores `asleep`, fences, and loads packets and progress. With both fences at least one of the
/// two sees what the other stored.
void order_stores_before_loads() noexcept { std::atomic_thread_fence(std::memory_order_seq_cst); }

Result<UniqueFd> make_doorbell() {
    UniqueFd bell{::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)};
    if (!bell) return system_error("creating a doorbell", errno);
    return bell;
}

/// Rejects files, pipes and sockets, where a write could block: they have a file type, an
/// eventfd has none.
bool may_be_doorbell(int fd) {
    struct stat status {};
    return ::fstat(fd, &status) == 0 && (status.st_mode & S_IFMT) == 0;
}

void ring_doorbell(int fd) {
    const std::uint64_t nothing = 0;
    // A failure is the peer's fault.
    [[maybe_unused]] const ssize_t rung = ::write(fd, &nothing, sizeof nothing);
}

std::uint64_t memory_bytes(std::uint32_t cells_to_worker, std::uint32_t cells_to_client) {
    return header_bytes + (std::uint64_t{cells_to_worker} + cells_to_client) * sizeof(Cell);
}

Header& header_of(const HostSlab& memory) { return *reinterpret_cast<Header*>(memory.bytes().data()); }

std::span<Cell> to_worker(const HostSlab& memory, const channel::RingOffer& offer) {
    return {reinterpret_cast<Cell*>(memory.bytes().data() + header_bytes), offer.cells_to_worker};
}
std::span<Cell> to_client(const HostSlab& memory, const channel::RingOffer& offer) {
    return {to_worker(memory, offer).data() + offer.cells_to_worker, offer.cells_to_client};
}

void store(Cell& cell, std::span<const std::byte> part) noexcept {
    for (std::atomic<std::uint64_t>& word : cell.words) {
        std::uint64_t value = 0;
        const std::size_t bytes = std::min(part.size(), sizeof value);
        if (bytes == 0) break;
        std::memcpy(&value, part.data(), bytes);
        word.store(value, std::memory_order_relaxed);
        part = part.subspan(bytes);
    }
}

void load(const Cell& cell, std::span<std::byte> part) noexcept {
    for (const std::atomic<std::uint64_t>& word : cell.words) {
        const std::uint64_t value = word.load(std::memory_order_relaxed);
        const std::size_t bytes = std::min(part.size(), sizeof value);
        if (bytes == 0) break;
        std::memcpy(part.data(), &value, bytes);
        part = part.subspan(bytes);
    }
}

/// Prefetches the cell for writing, so that the next packet's stores need not wait for the reader's
/// copy. Only a hint: processors without the instruction ignore it.
void take_to_write([[maybe_unused]] const Cell& cell) noexcept {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(cell.sequence));
#endif
}

}  // namespace

std::size_t RingWriter::packet_bytes_max() const noexcept {
    return std::min(cells_.size() / 4 * payload_bytes, bulkhead::packet_bytes_max);
}

Result<bool> RingWriter::has_room(std::size_t packet_bytes) {
    const std::uint64_t end = next_ + cells_of(packet_bytes);
    if (end - read_seen_ <= cells_.size()) return true;
    const std::uint64_t read = read_->cells.load(std::memory_order_acquire);
    if (read < read_seen_ || read > next_)
        return lies(fmt::format("a ring's reader has read {} cells, then {}, of {} written", read_seen_, read, next_));
    read_seen_ = read;
    return end - read_seen_ <= cells_.size();
}

void RingWriter::write(std::span<const std::byte> packet) noexcept {
    const std::size_t count = cells_of(packet.size());
    for (std::size_t i = count; i-- > 0;) {
        Cell& cell = cells_[(next_ + i) & (cells_.size() - 1)];
        store(cell, packet.subspan(i * payload_bytes));
        cell.sequence.store(next_ + i + 1, i == 0 ? std::memory_order_release : std::memory_order_relaxed);
    }
    next_ += count;
    for (const std::uint64_t coming : {next_, next_ + 1}) take_to_write(cells_[coming & (cells_.size() - 1)]);
}

std::uint64_t RingReader::sequence() const noexcept {
    return cells_[next_ & (cells_.size() - 1)].sequence.load(std::memory_order_acquire);
}

bool RingReader::readable() const noexcept {
    return sequence() != (next_ < cells_.size() ? 0 : next_ + 1 - cells_.size());
}

Result<std::size_t> RingReader::read(std::span<std::byte> buffer) {
    if (!readable()) return 0;
    if (const std::uint64_t seen = sequence(); seen != next_ + 1)
        return lies(fmt::format("cell {} of a ring has sequence {}", next_, seen));
    const auto cell = [&](std::size_t i) -> const Cell& { return cells_[(next_ + i) & (cells_.size() - 1)]; };
    __builtin_prefetch(&cell(1));  // every request has a second cell: fetch it while the
                                   // first is examined
    load(cell(0), buffer.first(payload_bytes));
    wire::Header header;
    std::memcpy(&header, buffer.data(), sizeof header);
    const std::size_t size = header.size_bytes;
    if (size < sizeof header || size > cells_.size() / 4 * payload_bytes || size > buffer.size())
        return lies(fmt::format("a packet of {} bytes in a ring of {} cells", size, cells_.size()));
    const std::size_t count = cells_of(size);
    for (std::size_t i = 1; i < count; ++i) {
        if (const std::uint64_t seen = cell(i).sequence.load(std::memory_order_relaxed); seen != next_ + i + 1)
            return lies(fmt::format("cell {} of a ring, the {}th of a packet of {} bytes, has sequence {}", next_ + i,
                                    i + 1, size, seen));
        load(cell(i), buffer.subspan(i * payload_bytes, std::min(payload_bytes, size - i * payload_bytes)));
    }
    next_ += count;
    read_->cells.store(next_, std::memory_order_release);
    return size;
}

RingEnd::RingEnd(HostSlab memory, bool is_worker, const channel::RingOffer& offer, UniqueFd doorbell,
                 UniqueFd peers_doorbell)
    : memory_{std::move(memory)}, offer_{offer}, doorbell_{std::move(doorbell)},
      peers_doorbell_{std::move(peers_doorbell)}, mine_{is_worker ? &header_of(memory_).worker
                                                                  : &header_of(memory_).client},
      peers_{is_worker ? &header_of(memory_).client : &header_of(memory_).worker},
      writer_{is_worker ? RingWriter{to_client(memory_, offer), header_of(memory_).of_client}
                        : RingWriter{to_worker(memory_, offer), header_of(memory_).of_worker}},
      reader_{is_worker ? RingReader{to_worker(memory_, offer), header_of(memory_).of_worker}
                        : RingReader{to_client(memory_, offer), header_of(memory_).of_client}} {}

RingEnd::~RingEnd() {
    if (!closed_in_child_[0].in_child()) mine_->asleep.store(has_left, std::memory_order_release);
}

Result<std::unique_ptr<RingEnd>> RingEnd::make(std::uint32_t cells_to_worker, std::uint32_t cells_to_client,
                                               const std::string& label) {
    const channel::RingOffer offer{cells_to_worker, cells_to_client, memory_bytes(cells_to_worker, cells_to_client)};
    Result<HostSlab> memory = HostSlab::create(offer.size_bytes, wire::SlabDirection::input, label);
    if (!memory) return std::move(memory).error();
    Result<UniqueFd> mine = make_doorbell(), peers = make_doorbell();
    if (!mine || !peers) return mine ? std::move(peers).error() : std::move(mine).error();
    return std::unique_ptr<RingEnd>{new RingEnd{std::move(*memory), true, offer, std::move(*mine), std::move(*peers)}};
}

Result<std::unique_ptr<RingEnd>> RingEnd::adopt(const channel::RingOffer& offer, std::vector<UniqueFd> fds) {
    const auto sensible = [](std::uint32_t cells) {
        return cells >= cells_min && cells <= cells_max && std::has_single_bit(cells);
    };
    if (fds.size() != wire::ring_offer_fds || !sensible(offer.cells_to_worker) || !sensible(offer.cells_to_client) ||
        offer.size_bytes != memory_bytes(offer.cells_to_worker, offer.cells_to_client))
        return lies(fmt::format("rings of {} and {} cells in {} bytes, with {} descriptors", offer.cells_to_worker,
                                offer.cells_to_client, offer.size_bytes, fds.size()));
    if (!may_be_doorbell(fds[1].get()) || !may_be_doorbell(fds[2].get()))
        return lies("a ring's doorbell is not an eventfd");
    Result<HostSlab> memory = HostSlab::adopt(std::move(fds[0]), offer.size_bytes, wire::SlabDirection::input);
    if (!memory) return std::move(memory).error().during("rings");
    std::unique_ptr<RingEnd> end{new RingEnd{std::move(*memory), false, offer, std::move(fds[2]), std::move(fds[1])}};
    end->closed_in_child_[0] = ClosedInChild{end->doorbell_.get()};
    end->closed_in_child_[1] = ClosedInChild{end->peers_doorbell_.get()};
    return end;
}

std::array<int, wire::ring_offer_fds> RingEnd::offer_fds() const noexcept {
    return {memory_.fd(), doorbell_.get(), peers_doorbell_.get()};
}

bool RingEnd::ring_if_asleep(std::uint32_t for_what) noexcept {
    if ((peers_->asleep.load(std::memory_order_relaxed) & for_what) == 0) return false;
    const std::uint32_t asked = peers_->asleep.fetch_and(has_left, std::memory_order_acq_rel);
    if ((asked & (wants_packets | wants_room)) == 0) return false;  // it woke up by itself
    ring_doorbell(peers_doorbell_.get());
    return true;
}

void RingEnd::announce() noexcept {
    order_stores_before_loads();
    ring_if_asleep(wants_packets);
}

Result<std::size_t> RingEnd::read(std::span<std::byte> buffer) {
    const Result<std::size_t> size = reader_.read(buffer);
    if (!size) return size;
    if (*size > 0) {
        room_owed_ = !ring_if_asleep(wants_room);  // without a fence: what this
                                                   // misses is seen below
    } else if (room_owed_) {
        order_stores_before_loads();
        ring_if_asleep(wants_room);
        room_owed_ = false;
    }
    return size;
}

bool RingEnd::prepare_to_sleep(std::size_t room_bytes) {
    mine_->asleep.store(wants_packets | (room_bytes > 0 ? wants_room : 0), std::memory_order_relaxed);
    order_stores_before_loads();
    if (std::exchange(room_owed_, false)) ring_if_asleep(wants_room);
    if (reader_.readable()) return false;
    if (room_bytes == 0) return true;
    const Result<bool> room = writer_.has_room(room_bytes);
    return room && !*room;  // the next write reports an error
}

void RingEnd::ring_own_doorbell() const noexcept { ring_doorbell(doorbell_.get()); }

}  // namespace bulkhead
