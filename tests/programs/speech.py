"""Speech and sound: spectrograms, CTC, transducers, waveforms, speakers, codecs."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from corpus import (
    Program,
    accuracy,
    apply_dense,
    confident_head,
    cross_entropy,
    dense,
    integers,
    normal,
    program,
    two_layers,
    weight,
)
from flax import nnx


@program("linen")
def connectionist_classification():
    """A convolutional recognizer with `optax.ctc_loss`, paddings and repeated labels."""

    class Recognizer(nn.Module):
        @nn.compact
        def __call__(self, frames):
            x = nn.relu(nn.Conv(16, (3,))(frames))
            x = x + nn.relu(nn.Conv(16, (3,))(x))
            x = nn.LayerNorm()(x)
            return nn.Dense(6)(x)

    model = Recognizer()
    frames = normal(3, 10, 8, seed=1)
    labels = integers(5, 3, 4, seed=2) + 1
    frame_paddings = jnp.zeros((3, 10)).at[1, 8:].set(1.0)
    label_paddings = jnp.zeros((3, 4)).at[2, 3:].set(1.0)
    params = model.init(jax.random.key(0), frames)

    def loss(params, batch):
        frames, frame_paddings, labels, label_paddings = batch
        logits = model.apply(params, frames)
        losses = optax.ctc_loss(logits, frame_paddings, labels, label_paddings)
        return losses.mean(), {"blank": jnp.mean(logits.argmax(-1) == 0)}

    return Program(loss, params, (frames, frame_paddings, labels, label_paddings))


@program("jax")
def masked_ctc():
    """CTC whose logits of letters that a language lacks are masked with -1e9."""
    params = two_layers(8, 24, 6)
    allowed = jnp.array([True, True, True, False, True, True])
    labels = jnp.array([[1, 2, 4], [5, 5, 1]])

    def loss(params, batch):
        frames, labels = batch
        hidden = jnp.tanh(apply_dense(params["hidden"], frames))
        logits = apply_dense(params["head"], hidden)
        logits = jnp.where(allowed, logits, -1e9)
        nothing = jnp.zeros(logits.shape[:2])
        losses = optax.ctc_loss(logits, nothing, labels, jnp.zeros(labels.shape))
        return losses.mean(), {}

    return Program(loss, params, (normal(2, 9, 8, seed=3), labels))


@program("jax")
def transducer():
    """RNN-T: every frame with every label, the forward variables by two scans in log space."""
    params = {
        "frames": weight(8, 16, seed=1),
        "labels": normal(6, 16, seed=2),
        "head": dense(16, 6, seed=3),
    }

    def log_likelihood(params, frames, labels):
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), labels])
        embedded_frames = frames @ params["frames"]
        x = embedded_frames[:, None] + params["labels"][before][None]
        logits = apply_dense(params["head"], jnp.tanh(x))
        log_probs = jax.nn.log_softmax(logits)
        blank = log_probs[:, :, 0]
        before_last = log_probs[:, :-1]
        letters = labels[None, :, None]
        emitted = jnp.take_along_axis(before_last, letters, axis=-1)[..., 0]

        def along_labels(start, emission):
            def turn(left, step):
                below, emission = step
                value = jnp.logaddexp(below, left + emission)
                return value, value

            _, rest = jax.lax.scan(turn, start[0], (start[1:], emission))
            return jnp.concatenate([start[:1], rest])

        first = jnp.concatenate([jnp.zeros(1), jnp.cumsum(emitted[0])])

        def turn(alpha, step):
            blank_before, emission = step
            return along_labels(alpha + blank_before, emission), None

        alpha, _ = jax.lax.scan(turn, first, (blank[:-1], emitted[1:]))
        return alpha[-1] + blank[-1, -1]

    def loss(params, batch):
        frames, labels = batch
        of_batch = jax.vmap(log_likelihood, in_axes=(None, 0, 0))
        return -of_batch(params, frames, labels).mean(), {}

    batch = normal(3, 6, 8, seed=4), integers(5, 3, 3, seed=5) + 1
    return Program(loss, params, batch)


@program("haiku")
def wavenet():
    """Dilated causal convolutions with gates and skips, sure of the class of each sample."""

    def network(classes):
        x = hk.Embed(8, 16)(classes)
        skips = 0.0
        for dilation in (1, 2, 4):
            gates = hk.Conv1D(32, 2, rate=dilation, padding=hk.pad.causal)(x)
            one, other = jnp.split(gates, 2, axis=-1)
            y = jnp.tanh(one) * jax.nn.sigmoid(other)
            skips = skips + hk.Linear(32)(y)
            x = x + hk.Linear(16)(y)
        return jax.nn.relu(skips)

    model = hk.without_apply_rng(hk.transform(network))
    classes = integers(8, 2, 13, seed=1)
    body = model.init(jax.random.key(0), classes[:, :-1])
    final = model.apply(body, classes[:, :-1])
    head = {
        "w": confident_head(final, classes[:, 1:], 8, margin=7.5),
        "b": jnp.zeros(8),
    }

    def loss(params, classes):
        final = model.apply(params["body"], classes[:, :-1])
        logits = apply_dense(params["head"], final)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, classes[:, 1:])
        return losses.mean(), {"accuracy": accuracy(logits, classes[:, 1:])}

    return Program(loss, {"body": body, "head": head}, classes)


@program("jax")
def spectral_vocoder():
    """A waveform from features, compared by the logarithm of its short-time spectrum."""
    params = {"hidden": dense(8, 24, seed=1), "out": dense(24, 8, seed=2)}
    window = jnp.hanning(16)

    def spectrum(wave):
        starts = jnp.arange(0, wave.shape[-1] - 15, 8)
        places = starts[:, None] + jnp.arange(16)[None]
        frames = wave[..., places]
        coefficients = jnp.fft.rfft(frames * window)
        return jnp.abs(coefficients) + 1e-2

    def loss(params, batch):
        features, wanted = batch
        hidden = jax.nn.leaky_relu(apply_dense(params["hidden"], features))
        wave = apply_dense(params["out"], hidden)
        wave = wave.reshape(len(features), -1)
        spoken = spectrum(wave)
        wanted = spectrum(wanted)
        difference = jnp.log(spoken) - jnp.log(wanted)
        magnitude = jnp.abs(difference).mean()
        error = jnp.linalg.norm(wanted - spoken)
        convergence = error / jnp.linalg.norm(wanted)
        return magnitude + convergence, {}

    return Program(loss, params, (normal(2, 6, 8, seed=3), normal(2, 48, seed=4)))


@program("nnx")
def speaker_embedding():
    """AAM-softmax: cosines to speakers with a margin on the right one, statistics pooled."""

    class Encoder(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(6, 16, (3,), rngs=rngs)
            self.out = nnx.Linear(32, 12, rngs=rngs)
            self.speakers = nnx.Param(normal(12, 5, seed=7))

        def __call__(self, frames):
            x = nnx.relu(self.conv(frames))
            mean = x.mean(1)
            deviation = jnp.sqrt(x.var(1) + 1e-5)
            statistics = jnp.concatenate([mean, deviation], axis=-1)
            x = self.out(statistics)
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
            speakers = self.speakers[...]
            norms = jnp.linalg.norm(speakers, axis=0, keepdims=True)
            return x @ (speakers / norms)

    def loss(model, batch):
        frames, speakers = batch
        cosines = model(frames)
        squared_sines = jnp.clip(1 - cosines**2, 1e-6, 1.0)
        sines = jnp.sqrt(squared_sines)
        moved = cosines * jnp.cos(0.2) - sines * jnp.sin(0.2)
        is_speaker = jax.nn.one_hot(speakers, 5) > 0
        logits = 15.0 * jnp.where(is_speaker, moved, cosines)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, speakers)
        return losses.mean(), {"accuracy": accuracy(cosines, speakers)}

    batch = normal(6, 8, 6, seed=1), integers(5, 6, seed=2)
    return Program(loss, Encoder(nnx.Rngs(0)), batch)


@program("equinox")
def conformer():
    """A conformer block: attention, a gated depthwise convolution, two half steps; by frames."""

    class Block(eqx.Module):
        first: eqx.nn.MLP
        attention: eqx.nn.MultiheadAttention
        gates: eqx.nn.Linear
        depthwise: eqx.nn.Conv1d
        second: eqx.nn.MLP
        norm: eqx.nn.LayerNorm
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 6)
            self.first = eqx.nn.MLP(
                in_size=16,
                out_size=16,
                width_size=24,
                depth=1,
                activation=jax.nn.silu,
                key=keys[0],
            )
            self.attention = eqx.nn.MultiheadAttention(2, 16, key=keys[1])
            self.gates = eqx.nn.Linear(16, 32, key=keys[2])
            self.depthwise = eqx.nn.Conv1d(
                in_channels=16,
                out_channels=16,
                kernel_size=3,
                padding=1,
                groups=16,
                key=keys[3],
            )
            self.second = eqx.nn.MLP(
                in_size=16,
                out_size=16,
                width_size=24,
                depth=1,
                activation=jax.nn.silu,
                key=keys[4],
            )
            self.norm = eqx.nn.LayerNorm(16)
            self.head = eqx.nn.Linear(16, 5, key=keys[5])

        def features(self, x):
            x = x + 0.5 * jax.vmap(self.first)(x)
            y = jax.vmap(self.norm)(x)
            x = x + self.attention(y, y, y)
            gates = jax.vmap(self.gates)(x)
            gated = jax.nn.glu(gates)
            x = x + self.depthwise(gated.T).T
            x = x + 0.5 * jax.vmap(self.second)(x)
            return jax.vmap(self.norm)(x)

        def __call__(self, x):
            return jax.vmap(self.head)(self.features(x))

    model = Block(jax.random.key(0))
    frames = normal(2, 7, 16, seed=1)
    labels = integers(5, 2, 7, seed=2)
    features = jax.vmap(model.features)(frames)
    matrix = confident_head(features, labels, 5, margin=8.0)
    model = eqx.tree_at(lambda m: m.head.weight, model, matrix.T)

    def loss(model, batch):
        frames, labels = batch
        logits = jax.vmap(model)(frames)
        return cross_entropy(logits, labels)

    return Program(loss, model, (frames, labels))


@program("jax")
def separation():
    """Two voices from a mixture: the better of both orders, by the signal to noise ratio."""
    params = {
        "in": dense(8, 32, seed=1),
        "masks": dense(32, 64, seed=2),
        "out": weight(32, 8, seed=3),
    }

    def ratio(voices, wanted):
        """Returns the ratio of signal to noise, in decibels, whatever the volume."""
        product = jnp.sum(voices * wanted, -1, keepdims=True)
        energy = jnp.sum(wanted**2, -1, keepdims=True)
        target = product / energy * wanted
        noise = voices - target
        noise_energy = jnp.sum(noise**2, axis=-1) + 1e-4
        target_energy = jnp.sum(target**2, axis=-1)
        return 10 * jnp.log10(target_energy / noise_energy + 1e-4)

    def loss(params, voices):
        mixture = voices.sum(1)
        frames = mixture.reshape(len(voices), -1, 8)
        hidden = jax.nn.relu(apply_dense(params["in"], frames))
        masks = jax.nn.sigmoid(apply_dense(params["masks"], hidden))
        masks = masks.reshape(*hidden.shape[:2], 2, 32)
        masked = masks * hidden[:, :, None]
        parts = masked @ params["out"]
        parts = parts.transpose(0, 2, 1, 3)
        parts = parts.reshape(voices.shape)
        straight = ratio(parts, voices).mean(-1)
        swapped_voices = voices[:, ::-1]
        crossed = ratio(parts, swapped_voices).mean(-1)
        better = jnp.maximum(straight, crossed)
        value = -better.mean()
        is_swapped = crossed > straight
        return value, {"swapped": jnp.mean(is_swapped)}

    return Program(loss, params, normal(4, 2, 32, seed=4))
