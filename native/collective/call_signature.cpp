#include <netfold/collective/call_signature.hpp>

namespace netfold::collective {
namespace {

CallForm with_average(CallForm form, bool average) {
  return average ? static_cast<CallForm>(static_cast<std::uint8_t>(form) + 1) : form;
}

bool is_average(CallForm form) {
  return form == CallForm::all_reduce_avg || form == CallForm::reduce_avg || form == CallForm::reduce_scatter_avg ||
         form == CallForm::step_avg;
}

bool has_root(CallForm form) {
  return form == CallForm::reduce || form == CallForm::reduce_avg || form == CallForm::broadcast;
}

CallForm form_of(const Call& call) {
  const bool average = call.average || (call.step_of & kStepOfAverage) != 0;
  switch (call.kind) {
    case Kind::all_reduce:
      return with_average(call.step_of != 0 ? CallForm::step : CallForm::all_reduce, average);
    case Kind::reduce:
      return with_average(CallForm::reduce, average);
    case Kind::reduce_scatter:
      return with_average(CallForm::reduce_scatter, average);
    case Kind::broadcast:
      return CallForm::broadcast;
    case Kind::all_gather:
      return CallForm::all_gather;
    default:
      return CallForm::barrier;
  }
}

const char* name_of(CallForm form) {
  constexpr const char* kNames[kCallFormCount] = {
      "all_reduce",          "all_reduce", "reduce",     "reduce",  "reduce_scatter",
      "reduce_scatter",      "broadcast",  "all_gather", "barrier", "a step of all_reduce",
      "a step of all_reduce"};
  return kNames[static_cast<std::uint8_t>(form)];
}

}  // namespace

CallSignature CallSignature::of(const Call& call) {
  const CallForm form = form_of(call);
  return {.form = form,
          .dtype = form == CallForm::barrier ? kernels::DType::u8 : call.dtype,
          .root = has_root(form) ? static_cast<std::uint8_t>(call.root) : std::uint8_t{0}};
}

std::uint16_t CallSignature::packed() const {
  return static_cast<std::uint16_t>(static_cast<unsigned>(form) | static_cast<unsigned>(dtype) << 4 |
                                    static_cast<unsigned>(root) << 8);
}

std::optional<CallSignature> CallSignature::unpacked(std::uint16_t bits) {
  const std::uint8_t form = bits & 0xf;
  const std::uint8_t dtype = bits >> 4 & 0xf;
  const CallSignature signature{static_cast<CallForm>(form), static_cast<kernels::DType>(dtype),
                                static_cast<std::uint8_t>(bits >> 8)};
  if (form >= kCallFormCount || !kernels::is_valid_dtype(dtype) || (signature.root != 0 && !has_root(signature.form))) {
    return std::nullopt;
  }
  return signature;
}

bool CallSignature::has_blocks() const {
  return form == CallForm::all_gather || form == CallForm::reduce_scatter || form == CallForm::reduce_scatter_avg;
}

std::string CallSignature::text(std::uint32_t operation, std::uint32_t elements, kernels::ReduceOp reduce) const {
  std::string text = std::string(name_of(form)) + " #" + std::to_string(operation);
  if (form == CallForm::barrier) return text;
  const char* const of = kernels::name(dtype);
  text += has_blocks() ? std::string(" of ") + of + " (digest of all sizes: " + std::to_string(elements & 0xffff) + ")"
                       : " of " + std::to_string(elements) + " " + of;
  const bool moves = form == CallForm::broadcast || form == CallForm::all_gather;
  std::string how = moves ? "" : is_average(form) ? "avg" : kernels::name(reduce);
  if (has_root(form)) how += (how.empty() ? "root " : ", root ") + std::to_string(root);
  return how.empty() ? text : text + " (" + how + ")";
}

}  // namespace netfold::collective
