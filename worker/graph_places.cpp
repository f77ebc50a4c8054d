#include "worker/graph_places.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/cuda/vmm_slab.h"
#include "ipc/slab_allocator.h"
#include "worker/gpu_slab_memory.h"

namespace bulkhead::worker {

GraphPlaces::Layout GraphPlaces::lay_out(std::span<const std::uint64_t> tensor_bytes) {
    Layout layout;
    SlabAllocator endless{std::numeric_limits<std::uint64_t>::max()};
    for (const std::uint64_t bytes : tensor_bytes)
        layout.offsets.push_back(endless.allocate(bytes).value().offset_bytes);
    layout.size_bytes = endless.leased_bytes();
    return layout;
}

void GraphPlaces::Needs::include(const Layout& inputs, const Layout& outputs) {
    input_bytes = std::max(input_bytes, inputs.size_bytes);
    output_bytes = std::max(output_bytes, outputs.size_bytes);
}

Result<std::shared_ptr<GraphPlaces>> GraphPlaces::reserve(std::shared_ptr<const cuda::Gpu> gpu, std::size_t count,
                                                          std::uint64_t slab_bytes_max) {
    const std::string attempt =
        fmt::format("reserving addresses for the slabs of {} channels on {}", count, cuda::to_string(gpu->uuid()));
    if ((gpu->features() & wire::feature_cuda_vmm) == 0)
        return Error{ErrorCode::not_permitted, attempt + ": it shares no memory by descriptor",
                     "leave out `graph_slabs`: each tensor is copied once, within the GPU"};
    std::shared_ptr<GraphPlaces> places{new GraphPlaces{gpu}};
    places->places_.resize(count);
    for (Place& place : places->places_)
        for (Side& side : place.sides) {
            auto addresses = cuda::AddressRange::reserve(gpu, slab_bytes_max);
            if (!addresses) return std::move(addresses).error().during(attempt);
            side.addresses = std::move(*addresses);
        }
    return places;
}

boost::json::object GraphPlaces::report() const {
    const std::scoped_lock lock{mutex_};
    const auto open = std::ranges::count_if(places_, &Place::open);
    const auto free = std::ranges::count_if(places_, [](const Place& place) { return place.open && is_free(place); });
    return {{"count", open}, {"free", free}};
}

std::byte* GraphPlaces::address(std::size_t place, wire::SlabDirection direction) const {
    return reinterpret_cast<std::byte*>(places_[place].sides[index(direction)].addresses->pointer());
}

Result<GraphPlaces::CaptureMemory> GraphPlaces::map_for_capture(std::size_t place, const Needs& needs) {
    std::shared_ptr<Hold> captures;
    {
        const std::scoped_lock lock{mutex_};
        if (!is_free(places_[place]))
            return Error{ErrorCode::internal, fmt::format("capturing at place {}, which a channel has", place), {}};
        captures = hold(place);
    }
    const std::uint64_t slabs_bytes_max = places_[place].sides[0].addresses->size_bytes();
    if (needs.input_bytes > slabs_bytes_max || needs.output_bytes > slabs_bytes_max - needs.input_bytes)
        return Error{
            ErrorCode::input_invalid,
            fmt::format("the largest bucket's inputs, {} bytes, and outputs, {}, in slabs of one channel, {} in all",
                        needs.input_bytes, needs.output_bytes, slabs_bytes_max),
            "raise `channel.max` of the model, or leave out `graph_slabs`"};
    CaptureMemory memory;
    for (const auto direction : {wire::SlabDirection::input, wire::SlabDirection::output}) {
        const bool reads = direction == wire::SlabDirection::input;
        const std::uint64_t bytes = reads ? needs.input_bytes : needs.output_bytes;
        if (bytes == 0) continue;
        auto made = captures->make_slab(direction, bytes);
        if (!made)
            return std::move(made).error().during(
                fmt::format("the {} of all graphs at place {}", reads ? "inputs" : "outputs", place));
        memory[index(direction)] = std::move(*made);
    }
    return memory;
}

void GraphPlaces::open(std::size_t place, const Needs& needs) {
    const std::scoped_lock lock{mutex_};
    side(place, wire::SlabDirection::input).needed_bytes = needs.input_bytes;
    side(place, wire::SlabDirection::output).needed_bytes = needs.output_bytes;
    places_[place].open = true;
}

std::shared_ptr<GraphPlaces::Hold> GraphPlaces::hold(std::size_t place) {
    auto held = std::make_shared<Hold>(shared_from_this(), place);
    places_[place].held = true;
    return held;
}

std::shared_ptr<GraphPlaces::Hold> GraphPlaces::take() {
    const std::scoped_lock lock{mutex_};
    for (std::size_t i = 0; i < places_.size(); ++i)
        if (places_[i].open && is_free(places_[i])) return hold(i);
    return nullptr;
}

void GraphPlaces::let_go(std::size_t place) noexcept {
    const std::scoped_lock lock{mutex_};
    places_[place].held = false;
}

std::optional<std::size_t> GraphPlaces::find(const Layout& inputs, std::span<const TensorView> tensors) const {
    const std::scoped_lock lock{mutex_};
    for (std::size_t place = 0; place < places_.size(); ++place) {
        if (!places_[place].held || (!tensors.empty() && !places_[place].sides[0].mapped)) continue;
        const std::byte* const base = address(place, wire::SlabDirection::input);
        const bool all =
            std::ranges::equal(tensors, inputs.offsets, [base](const TensorView& tensor, std::uint64_t at) {
                return tensor.on_device && tensor.bytes.data() == base + at;
            });
        if (all) return place;
    }
    return std::nullopt;
}

bool GraphPlaces::matches(std::size_t place, const Layout& outputs, std::span<const std::span<std::byte>> rooms) const {
    const std::scoped_lock lock{mutex_};
    if (!rooms.empty() && !places_[place].sides[1].mapped) return false;
    const std::byte* const base = address(place, wire::SlabDirection::output);
    return std::ranges::equal(rooms, outputs.offsets,
                              [base](std::span<std::byte> room, std::uint64_t at) { return room.data() == base + at; });
}

/// Keeps the place with it.
class GraphPlaces::Hold::Memory final : public SlabMemory {
public:
    Memory(std::shared_ptr<Hold> hold, wire::SlabDirection direction, cuda::VmmSlab slab, UniqueFd exported)
        : hold_{std::move(hold)}, direction_{direction}, slab_{std::move(slab)}, exported_{std::move(exported)} {}
    ~Memory() override { hold_->unmapped(direction_, slab_.unmap()); }
    [[nodiscard]] wire::SlabKind kind() const noexcept override { return wire::SlabKind::cuda_vmm; }
    [[nodiscard]] std::span<std::byte> bytes() const noexcept override {
        return {reinterpret_cast<std::byte*>(slab_.pointer()), slab_.size_bytes()};
    }
    [[nodiscard]] int fd() const noexcept override { return exported_.get(); }

private:
    std::shared_ptr<Hold> hold_;
    wire::SlabDirection direction_;
    cuda::VmmSlab slab_;
    UniqueFd exported_;
};

bool GraphPlaces::Hold::has_slab(wire::SlabDirection direction) const {
    const std::scoped_lock lock{places_->mutex_};
    return places_->side(place_, direction).mapped;
}

std::uint64_t GraphPlaces::Hold::needed_bytes(wire::SlabDirection direction) const {
    const std::scoped_lock lock{places_->mutex_};
    return places_->side(place_, direction).needed_bytes;
}

Result<std::unique_ptr<SlabMemory>> GraphPlaces::Hold::make_slab(wire::SlabDirection direction,
                                                                 std::uint64_t size_bytes) {
    if (has_slab(direction))
        return Error{ErrorCode::resources_exhausted, fmt::format("a second slab at place {}", place_), {}};
    Result<cuda::VmmSlab> slab =
        cuda::VmmSlab::create(places_->gpu_, size_bytes, places_->side(place_, direction).addresses);
    if (!slab) return std::move(slab).error();
    if (Result<> cleared = clear(*places_->gpu_, slab->pointer(), slab->size_bytes()); !cleared)
        return std::move(cleared).error();
    Result<UniqueFd> exported = slab->export_fd();
    if (!exported) return std::move(exported).error();
    auto memory = std::make_unique<Memory>(shared_from_this(), direction, std::move(*slab), std::move(*exported));
    const std::scoped_lock lock{places_->mutex_};
    places_->side(place_, direction).mapped = true;
    return memory;
}

void GraphPlaces::Hold::unmapped(wire::SlabDirection direction, const Result<>& done) noexcept {
    const std::scoped_lock lock{places_->mutex_};
    if (done) {
        places_->side(place_, direction).mapped = false;
        return;
    }
    places_->places_[place_].open = false;
    spdlog::warn("no channel gets graph place {} any more: {}", place_, done.error().text());
}

}  // namespace bulkhead::worker
