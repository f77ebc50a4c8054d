#include "worker/slabs/channel_slabs.h"

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/channel/tensor_layout.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {

ChannelSlabs::ChannelSlabs(std::string label_prefix, const config::ChannelLimits& limits,
                           std::shared_ptr<SlabBudget> worker_bytes)
    : label_prefix_{std::move(label_prefix)}, huge_pages_{limits.huge_pages}, idle_{limits.idle},
      slab_count_{std::make_shared<SlabBudget>(limits::channel_slabs_max)},
      bytes_{std::make_shared<SlabBudget>(limits.bytes_max)}, worker_bytes_{std::move(worker_bytes)} {}

Result<> ChannelSlabs::add(wire::SlabDirection direction, std::uint64_t size_bytes, std::uint64_t request_id,
                           wire::SlabKind kind) {
    if (is_gpu(kind))
        if (Result<> made = make_events(); !made) return made;
    const std::uint64_t page =
        huge_pages_ || is_gpu(kind) ? limits::huge_slab_granularity_bytes : limits::slab_granularity_bytes;
    std::unique_lock lock{mutex_};  // a size that depends on the remainder is reserved in one step
    if (const std::uint64_t left = bytes_->left(); size_bytes <= left) {
        const std::uint64_t rounded = (size_bytes + page - 1) / page * page;
        size_bytes = is_gpu(kind) ? rounded : std::min(left, rounded);
    }
    Result<Reservation> reserved = reserve(size_bytes);
    if (!reserved) return std::move(reserved).error();
    const std::uint32_t id = ++last_id_;
    lock.unlock();
    Result<SlabMemory> memory = make_memory(kind, direction, size_bytes, id);
    if (!memory) return std::move(memory).error();
    const std::uint64_t slab_bytes = memory->bytes.size();
    if (slab_bytes > size_bytes) {  // a device may allocate in steps larger than pages
        reserved = Reservation{};
        reserved = reserve(slab_bytes);
        if (!reserved) return std::move(reserved).error();
    }
    lock.lock();
    // Only a slab that the client asked for changes the kind: the kind may change again before the
    // worker's own slab is made.
    if (direction == wire::SlabDirection::output && is_gpu(kind) && request_id != 0) output_kind_ = kind;
    const bool is_first = std::ranges::none_of(
        slabs_, [&](const auto& slab) { return slab->direction == direction && slab->memory.kind == kind; });
    slabs_.push_back(std::make_unique<Slab>(Slab{.id = id,
                                                 .direction = direction,
                                                 .request_id = request_id,
                                                 .is_first = is_first,
                                                 .reserved = std::move(*reserved),
                                                 .memory = std::move(*memory),
                                                 .allocator = SlabAllocator{slab_bytes},
                                                 .idle_since = Clock::now()}));
    return {};
}

Result<ChannelSlabs::Reservation> ChannelSlabs::reserve(std::uint64_t bytes) const {
    Reservation reserved;
    if (!(reserved.bytes = bytes_->take(bytes)))
        return Error{
            ErrorCode::resources_exhausted,
            fmt::format("a slab of {} bytes for a channel that has {} of its {}", bytes, bytes_->used(), bytes_->max()),
            "give results back sooner, or raise `channel.max` of the model"};
    if (!(reserved.slab = slab_count_->take(1)))
        return Error{ErrorCode::resources_exhausted, fmt::format("slab {} of a channel", slab_count_->max() + 1),
                     "ask for fewer, larger slabs, return loans, or raise `channel.input` and `channel.output`"};
    if (!(reserved.worker_bytes = worker_bytes_->take(bytes)))
        return Error{ErrorCode::resources_exhausted,
                     fmt::format("a slab of {} bytes; the slabs of all channels of this worker have {} of {}", bytes,
                                 worker_bytes_->used(), worker_bytes_->max()),
                     "close channels or give results back, or raise `channel.worker_max` of the model"};
    return reserved;
}

Result<SlabMemory> ChannelSlabs::make_memory(wire::SlabKind kind, wire::SlabDirection direction,
                                             std::uint64_t size_bytes, std::uint32_t id) const {
    if (is_gpu(kind)) return SlabMemory::on_gpu(kind, gpu_, size_bytes);
    Result<HostSlab> slab = HostSlab::create(size_bytes, direction, fmt::format("{}{}", label_prefix_, id),
                                             huge_pages_ ? SlabPages::huge : SlabPages::plain);
    if (!slab) return std::move(slab).error();
    if (!slab->plain_because().empty()) {
        static std::once_flag said;  // the reason is the same for each slab of this worker
        std::call_once(said, [&] { spdlog::warn("slabs lie on plain pages: {}", slab->plain_because()); });
    }
    return SlabMemory{std::move(*slab)};
}

Result<> ChannelSlabs::lend(std::uint32_t id, std::uint64_t size_bytes, UniqueFd memfd) {
    std::unique_lock lock{mutex_};
    if (id <= last_lent_id_)
        return Error{ErrorCode::protocol_violation, fmt::format("lending slab {} after slab {}", id, last_lent_id_),
                     "number each loan of a channel above those before it"};
    Result<Reservation> reserved = reserve(0);
    if (!reserved) return std::move(reserved).error();
    last_lent_id_ = id;
    lock.unlock();
    Result<HostSlab> slab = HostSlab::adopt(std::move(memfd), size_bytes, wire::SlabDirection::output);
    if (!slab) return std::move(slab).error().during(fmt::format("taking lent slab {}", id));
    lock.lock();
    slabs_.push_back(std::make_unique<Slab>(Slab{.id = id,
                                                 .direction = wire::SlabDirection::input,
                                                 .request_id = 0,
                                                 .is_first = false,
                                                 .reserved = std::move(*reserved),
                                                 .memory = SlabMemory{std::move(*slab)},
                                                 .allocator = SlabAllocator{0},
                                                 .idle_since = {},
                                                 .offered = true}));
    return {};
}

std::vector<ChannelSlabs::Offer> ChannelSlabs::take_offers() {
    const std::lock_guard lock{mutex_};
    std::vector<Offer> offers;
    for (const auto& slab : slabs_) {
        if (std::exchange(slab->offered, true)) continue;
        const SlabMemory& memory = slab->memory;
        offers.push_back(
            {{slab->request_id, slab->id, slab->direction, memory.kind, memory.bytes.size(), memory.handle},
             memory.fd});
    }
    return offers;
}

Result<ChannelSlabs::TensorBytes> ChannelSlabs::input(const channel::Tensor& tensor) const {
    const wire::LeaseRef& lease = tensor.lease;
    const std::lock_guard lock{mutex_};
    const Slab* slab = find(lease.slab_id);
    if (slab == nullptr || slab->direction != wire::SlabDirection::input || slab->state == State::returned)
        return Error{ErrorCode::protocol_violation,
                     fmt::format("slab {} is not an input slab of this channel{}", lease.slab_id,
                                 slab != nullptr && slab->state == State::returned ? ": it was returned" : ""),
                     "put inputs into a slab that was offered with direction input, or lent"};
    const std::span<std::byte> bytes = slab->memory.bytes;
    if (Result<> placed = check_placement(lease, bytes.size()); !placed) return std::move(placed).error();
    if (Result<> known = check_event(tensor.event_id); !known) return std::move(known).error();
    return TensorBytes{bytes.subspan(lease.offset_bytes, lease.size_bytes), is_gpu(slab->memory.kind)};
}

Result<ChannelSlabs::Room> ChannelSlabs::allocate_output(std::uint64_t size_bytes, wire::SlabKind kind) {
    if (auto room = allocate_in_existing(size_bytes, kind)) return *room;
    if (is_gpu(kind) && kind != output_kind())
        return Error{ErrorCode::resources_exhausted, "its client has given back the slab on the GPU meanwhile",
                     "send the request again: its results lie on the host now"};
    // Halves the step until there is room for it, at least to the needed size.
    const std::uint64_t at_least = std::max<std::uint64_t>(size_bytes, wire::tensor_alignment);
    std::uint64_t step = std::max(at_least, output_growth(kind));
    Result<> grown = add(wire::SlabDirection::output, step, 0, kind);
    while (!grown && step > at_least &&
           (grown.error().code == ErrorCode::resources_exhausted || grown.error().code == ErrorCode::out_of_memory)) {
        step = std::max(at_least, step / 2);
        grown = add(wire::SlabDirection::output, step, 0, kind);
    }
    if (!grown) return std::move(grown).error();
    if (auto room = allocate_in_existing(size_bytes, kind)) return *room;
    return Error{ErrorCode::internal, fmt::format("a fresh output slab has no room for {} bytes", size_bytes), {}};
}

std::uint64_t ChannelSlabs::output_growth(wire::SlabKind kind) const {
    const std::lock_guard lock{mutex_};
    std::uint64_t have = 0;
    for (const auto& slab : slabs_)
        if (slab->direction == wire::SlabDirection::output && slab->state == State::in_use && slab->memory.kind == kind)
            have += slab->memory.bytes.size();
    return std::max(limits::output_growth_bytes, std::min(have, bytes_->left() / 2));
}

std::optional<ChannelSlabs::Room> ChannelSlabs::allocate_in_existing(std::uint64_t size_bytes, wire::SlabKind kind) {
    const std::lock_guard lock{mutex_};
    for (const auto& slab : slabs_) {
        if (slab->direction != wire::SlabDirection::output || slab->state != State::in_use) continue;
        if (slab->memory.kind != kind) continue;
        const auto block = slab->allocator.allocate(size_bytes);
        if (!block) continue;
        return Room{{slab->id, 0, block->offset_bytes, block->size_bytes, block->lease_id},
                    slab->memory.bytes.subspan(block->offset_bytes, block->size_bytes)};
    }
    return std::nullopt;
}

Result<> ChannelSlabs::release(const wire::LeaseRef& lease) {
    const std::lock_guard lock{mutex_};
    Slab* slab = find(lease.slab_id);
    if (slab == nullptr)  // input slabs have no leases here
        return Error{
            ErrorCode::protocol_violation,
            fmt::format("releasing a lease of slab {}, which is not an output slab of this channel", lease.slab_id),
            "give back each lease of a result once"};
    if (Result<> known = check_event(lease.event_id); !known) return known;
    Result<> released = slab->allocator.release({lease.offset_bytes, lease.size_bytes, lease.lease_id});
    if (released && !slab->is_first && slab->allocator.leases() == 0) slab->idle_since = Clock::now();
    if (released && lease.event_id != 0 &&
        std::ranges::find(released_behind_, lease.event_id) == released_behind_.end())
        released_behind_.push_back(lease.event_id);
    return released;
}

Result<> ChannelSlabs::make_events() {
    if (events_) return {};
    Result<ChannelEvents> made = ChannelEvents::make(gpu_);
    if (!made) return std::move(made).error();
    const std::lock_guard lock{mutex_};
    events_ = std::move(*made);
    return {};
}

std::vector<channel::EventOffer> ChannelSlabs::take_event_offers() {
    const std::lock_guard lock{mutex_};
    return events_ ? events_->take_offers() : std::vector<channel::EventOffer>{};
}

Result<> ChannelSlabs::check_event(std::uint32_t event_id) const {
    if (event_id == 0 || (events_ && events_->is_clients(event_id))) return {};
    return Error{ErrorCode::protocol_violation,
                 fmt::format("event {}, which this channel's client does not record", event_id),
                 "name an event that was offered with from_worker = 0"};
}

wire::SlabKind ChannelSlabs::output_kind() const {
    const std::lock_guard lock{mutex_};
    return output_kind_;
}

Result<> ChannelSlabs::wait_for_client(cuda::CUstream stream, std::span<const channel::Tensor> inputs) {
    std::vector<std::uint32_t> ids;
    {
        const std::lock_guard lock{mutex_};
        ids.swap(released_behind_);
    }
    for (const channel::Tensor& input : inputs)
        if (input.event_id != 0 && std::ranges::find(ids, input.event_id) == ids.end()) ids.push_back(input.event_id);
    return ids.empty() ? Result<>{} : events_->make_wait(stream, ids);
}

Result<std::uint32_t> ChannelSlabs::record_done(cuda::CUstream stream) { return events_->record(stream); }

std::vector<std::uint32_t> ChannelSlabs::withdraw(const auto& matches) {
    const std::lock_guard lock{mutex_};
    std::vector<std::uint32_t> withdrawn;
    for (const auto& slab : slabs_) {
        if (!slab->offered || slab->state != State::in_use || !matches(*slab)) continue;
        slab->state = State::withdrawn;
        withdrawn.push_back(slab->id);
    }
    return withdrawn;
}

std::vector<std::uint32_t> ChannelSlabs::withdraw_gpu() {
    return withdraw([](const Slab& slab) { return is_gpu(slab.memory.kind); });
}
std::vector<std::uint32_t> ChannelSlabs::withdraw_idle(Clock::time_point now) {
    return withdraw([&](const Slab& slab) { return is_idle(slab) && now >= slab.idle_since + idle_; });
}

std::uint64_t ChannelSlabs::gpu_bytes_lent() const {
    const std::lock_guard lock{mutex_};
    std::uint64_t bytes = 0;
    for (const auto& slab : slabs_)
        if (is_gpu(slab->memory.kind) && slab->offered && slab->state != State::returned)
            bytes += slab->memory.bytes.size();
    return bytes;
}

bool ChannelSlabs::is_idle(const Slab& slab) const {
    return slab.direction == wire::SlabDirection::output && !slab.is_first && slab.offered &&
           slab.state == State::in_use && slab.allocator.leases() == 0;
}

Clock::time_point ChannelSlabs::idle_due() const {
    const std::lock_guard lock{mutex_};
    Clock::time_point due = never;
    for (const auto& slab : slabs_)
        if (is_idle(*slab)) due = std::min(due, slab->idle_since + idle_);
    return due;
}

Result<> ChannelSlabs::give_back(std::uint32_t id) {
    const std::lock_guard lock{mutex_};
    Slab* slab = find(id);
    const auto refused = [id](std::string_view why) {
        return Error{ErrorCode::protocol_violation, fmt::format("returning slab {}, {}", id, why),
                     "return each slab once: a loan, an input or GPU slab, or an output slab that was withdrawn"};
    };
    // A client cannot know a slab before its offer.
    if (slab == nullptr || !slab->offered) return refused("which this channel does not have");
    if (slab->state == State::returned) return refused("which was returned before");
    // A client that cannot import device memory returns it. After the last such slab, its results
    // go to the host.
    if (slab->direction == wire::SlabDirection::output && slab->state != State::withdrawn) {
        if (!is_gpu(slab->memory.kind)) return refused("an output slab that was not withdrawn");
        slab->state = State::returned;
        const bool has_more = std::ranges::any_of(slabs_, [this](const auto& other) {
            return other->direction == wire::SlabDirection::output && other->state == State::in_use &&
                   other->memory.kind == output_kind_;
        });
        if (!has_more) output_kind_ = wire::SlabKind::host_memfd;
    }
    slab->state = State::returned;
    return {};
}

ChannelSlabs::Returned ChannelSlabs::take_returned(const std::function<bool(std::uint32_t id)>& is_read) {
    const std::lock_guard lock{mutex_};
    Returned taken;
    for (auto& slab : slabs_)
        if (slab->state == State::returned && slab->allocator.leases() == 0 && !is_read(slab->id))
            taken.push_back(std::move(slab));
    std::erase(slabs_, nullptr);
    return taken;
}

bool ChannelSlabs::wait_for_gpu(const Returned& slabs) {
    return std::ranges::any_of(slabs, [](const auto& slab) { return is_gpu(slab->memory.kind) || slab->registered; });
}
bool ChannelSlabs::wait_for_gpu() const {
    const std::lock_guard lock{mutex_};
    return wait_for_gpu(slabs_);
}

void ChannelSlabs::drop(Returned slabs, Model& model) noexcept {
    for (const auto& slab : slabs)
        if (slab->registered) model.unregister_host_memory(slab->memory.bytes);
}

void ChannelSlabs::register_with(Model& model) {
    std::vector<std::span<std::byte>> fresh;
    {
        const std::lock_guard lock{mutex_};
        for (const auto& slab : slabs_)
            if (!is_gpu(slab->memory.kind) && !std::exchange(slab->registered, true))
                fresh.push_back(slab->memory.bytes);
    }
    for (const std::span<std::byte> bytes : fresh) model.register_host_memory(bytes);
}

void ChannelSlabs::unregister_from(Model& model) noexcept { drop(std::move(slabs_), model); }

ChannelSlabs::Slab* ChannelSlabs::find(std::uint32_t id) const {
    const auto slab = std::ranges::find(slabs_, id, &Slab::id);
    return slab == slabs_.end() ? nullptr : slab->get();
}

}  // namespace bulkhead::worker
