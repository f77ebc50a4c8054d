#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include <boost/json/object.hpp>

#include "ipc/cuda/address_range.h"
#include "ipc/error.h"
#include "ipc/wire.h"
#include "worker/model.h"
#include "worker/slab_memory.h"

namespace bulkhead::worker {

/// Addresses on the GPU where a model's graphs read their inputs and write their outputs, while a client's slabs lie
/// there.
///
/// A graph has its addresses for life; slabs come and go. So a place is addresses alone, one range for an input slab
/// and one for an output slab, reserved as long as the process lives. For each place the model captures its graphs once
/// more, on memory that is gone afterwards. A channel that asks for a GPU slab while a place is free gets one of fresh
/// memory mapped there, and no other channel does until it has let go: nothing of one client's is ever seen by the
/// next. A request whose tensors lie in its slabs just where a graph of that place has its own is replayed without a
/// copy.
///
/// Thread  any; memory is mapped and unmapped on the executor, and unmapping waits for the GPU: never under a replay
class GraphPlaces : public std::enable_shared_from_this<GraphPlaces> {
public:
    /// Offsets of the tensors of one graph in a slab: those that a client gets who allocates them there in the method's
    /// order while the slab is empty, as docs/channel.md describes.
    struct Layout {
        std::vector<std::uint64_t> offsets;
        std::uint64_t size_bytes = 0;
    };
    [[nodiscard]] static Layout lay_out(std::span<const std::uint64_t> tensor_bytes);

    /// `slab_bytes_max`: no slab of a channel is longer, so each fits.
    /// Errors  not_permitted (this GPU shares no memory by descriptor), out_of_memory (of addresses)
    static Result<std::shared_ptr<GraphPlaces>> reserve(std::shared_ptr<const bulkhead::cuda::Gpu> gpu,
                                                        std::size_t count, std::uint64_t slab_bytes_max);

    [[nodiscard]] std::size_t count() const noexcept { return places_.size(); }
    /// `places` of `graphs` in docs/worker-link.md: those that channels can have, and those that none has now.
    [[nodiscard]] boost::json::object report() const;
    [[nodiscard]] std::byte* address(std::size_t place, wire::SlabDirection direction) const;

    /// How long a slab must be for all graphs of a place, by direction.
    struct Needs {
        std::uint64_t input_bytes = 0;
        std::uint64_t output_bytes = 0;
        void include(const Layout& inputs, const Layout& outputs);
    };
    /// Memory at a place that no channel has, for its captures: unmapped with these two.
    using CaptureMemory = std::array<std::unique_ptr<SlabMemory>, 2>;
    /// Errors  out_of_memory; input_invalid: longer than any slab
    [[nodiscard]] Result<CaptureMemory> map_for_capture(std::size_t place, const Needs& needs);
    /// Its graphs are captured: from now on channels may have it.
    void open(std::size_t place, const Needs& needs);

    /// A channel's place, until its last slab there is gone.
    class Hold;
    /// Null while there is none to be had.
    [[nodiscard]] std::shared_ptr<Hold> take();

    /// The place where these inputs lie, each where a graph of this layout reads it.
    [[nodiscard]] std::optional<std::size_t> find(const Layout& inputs, std::span<const TensorView> tensors) const;
    /// Whether this room is where that place's graph of this layout writes its outputs.
    [[nodiscard]] bool matches(std::size_t place, const Layout& outputs,
                               std::span<const std::span<std::byte>> rooms) const;

private:
    /// One direction of a place.
    struct Side {
        std::shared_ptr<const bulkhead::cuda::AddressRange> addresses;
        std::uint64_t needed_bytes = 0;
        bool mapped = false;  ///< for good where unmapping failed: then nobody gets this place any more
    };
    struct Place {
        std::array<Side, 2> sides;
        bool open = false;
        bool held = false;
    };
    explicit GraphPlaces(std::shared_ptr<const bulkhead::cuda::Gpu> gpu) : gpu_{std::move(gpu)} {}
    static std::size_t index(wire::SlabDirection direction) { return direction == wire::SlabDirection::input ? 0 : 1; }
    static bool is_free(const Place& place) { return !place.held && !place.sides[0].mapped && !place.sides[1].mapped; }
    [[nodiscard]] std::shared_ptr<Hold> hold(std::size_t place);  ///< with the lock held
    Side& side(std::size_t place, wire::SlabDirection direction) { return places_[place].sides[index(direction)]; }
    void let_go(std::size_t place) noexcept;

    const std::shared_ptr<const bulkhead::cuda::Gpu> gpu_;
    mutable std::mutex mutex_;
    std::vector<Place> places_;  ///< their number and addresses never change
};

class GraphPlaces::Hold : public std::enable_shared_from_this<GraphPlaces::Hold> {
public:
    Hold(std::shared_ptr<GraphPlaces> places, std::size_t place) : places_{std::move(places)}, place_{place} {}
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    ~Hold() { places_->let_go(place_); }

    [[nodiscard]] bool has_slab(wire::SlabDirection direction) const;
    [[nodiscard]] std::uint64_t needed_bytes(wire::SlabDirection direction) const;
    /// A slab of kind cuda_vmm at this place, which holds it too. On the executor, as its end.
    /// Errors  as VmmSlab::create; resources_exhausted: there is one
    [[nodiscard]] Result<std::unique_ptr<SlabMemory>> make_slab(wire::SlabDirection direction,
                                                                std::uint64_t size_bytes);

private:
    class Memory;
    void unmapped(wire::SlabDirection direction, const Result<>& done) noexcept;

    const std::shared_ptr<GraphPlaces> places_;
    const std::size_t place_;
};

}  // namespace bulkhead::worker
