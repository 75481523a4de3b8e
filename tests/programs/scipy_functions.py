"""The functions of `jax.scipy` that have a derivative, behind a layer that is trained."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import jax.scipy.spatial.transform  # which `jax.scipy` does not import by itself
from corpus import (
    Program,
    apply_dense,
    dense,
    normal,
    program,
    two_layers,
    weight,
)
from jax.scipy import special


def behind_layers(
    loss_of: Callable[[Any], Any], outputs: int = 8, rows: int = 8
) -> Program:
    """Returns a program with a loss of the outputs of two layers."""
    params = two_layers(6, 24, outputs)

    def loss(params, x):
        hidden = jnp.tanh(apply_dense(params["hidden"], x))
        outputs = apply_dense(params["head"], hidden)
        return jnp.mean(loss_of(outputs)), {}

    return Program(loss, params, normal(rows, 6, seed=3), scale=2.0**4)


def positive(x: jax.Array) -> jax.Array:
    return jax.nn.softplus(x) + 0.1


def definite(x: jax.Array) -> jax.Array:
    """Returns a symmetric and positive definite matrix, made from any matrix."""
    return x.T @ x / len(x) + jnp.eye(x.shape[-1])


@program("jax")
def special_of_gamma():
    def loss(x):
        a = positive(x)
        b = positive(-x)
        sums = special.gammaln(a)
        sums += special.digamma(b)
        sums += special.polygamma(1, a)
        of_two = special.betaln(a, b) + special.gammainc(a, 1.5)
        sums += of_two
        return sums + special.multigammaln(a + 2.0, 2)

    return behind_layers(loss)


@program("jax")
def special_of_errors():
    def loss(x):
        sums = special.erf(x)
        sums += special.erfc(x)
        sums += special.log_ndtr(x)
        p = 0.9 * special.ndtr(x) + 0.05
        return sums + special.ndtri(p)

    return behind_layers(loss)


@program("jax")
def special_of_entropies():
    def loss(x):
        p = special.expit(x)
        q = special.softmax(x, axis=-1)
        sums = special.entr(p)
        sums += special.xlogy(p, q)
        sums += special.xlog1py(p, q)
        divergences = special.rel_entr(p, q) + special.kl_div(p, q)
        sums += divergences + special.logit(p)
        return sums.sum(-1) + special.logsumexp(x, axis=-1)

    return behind_layers(loss)


@program("jax")
def special_of_bessel():
    def loss(x):
        sums = special.i0(x)
        sums += special.i0e(x)
        sums += special.i1(x)
        sums += special.i1e(x)
        share = jax.nn.sigmoid(x)
        sums += special.betainc(1.5, 2.5, share)
        inside = 0.3 + 0.5 * jax.nn.sigmoid(x)
        return sums + special.spence(inside)

    return behind_layers(loss)


@program("jax")
def stats_of_reals():
    def loss(x):
        location = x[:, :4]
        scale = positive(x[:, 4:])
        y = jnp.linspace(-2.0, 2.0, 4)
        densities = jsp.stats.norm.logpdf(y, location, scale)
        densities += jsp.stats.laplace.logpdf(y, location, scale)
        densities += jsp.stats.logistic.logpdf(y, location, scale)
        densities += jsp.stats.cauchy.logpdf(y, location, scale)
        densities += jsp.stats.t.logpdf(y, 4.0, location, scale)
        return -densities - jsp.stats.norm.logcdf(y, location, scale)

    return behind_layers(loss)


@program("jax")
def stats_of_positives_and_counts():
    def loss(x):
        a = positive(x[:, :4])
        b = positive(x[:, 4:])
        y = jnp.linspace(0.2, 0.8, 4)
        counts = jnp.arange(4)
        densities = jsp.stats.gamma.logpdf(y, a, scale=b)
        densities = densities + jsp.stats.beta.logpdf(y, a, b)
        exponential = jsp.stats.expon.logpdf(y, scale=a)
        pareto = jsp.stats.pareto.logpdf(y + 4.0, b)
        densities += exponential + pareto
        chi_squared = jsp.stats.chi2.logpdf(y, a)
        von_mises = jsp.stats.vonmises.logpdf(y, a)
        densities += chi_squared + von_mises
        densities += jsp.stats.poisson.logpmf(counts, a)
        return -densities - jsp.stats.nbinom.logpmf(counts, b, 0.5)

    return behind_layers(loss)


@program("jax")
def stats_of_vectors():
    def loss(x):
        covariance = definite(x)
        y = normal(5, 8, seed=7)
        density = jsp.stats.multivariate_normal.logpdf(y, jnp.mean(x, 0), covariance)
        shares = jnp.full(8, 0.125)
        return -density.mean() - jsp.stats.dirichlet.logpdf(shares, positive(x[0]))

    return behind_layers(loss)


@program("jax")
def stats_of_kernels():
    """A kernel density of points that were transformed, far from 0, which it whitens."""

    def loss(x):
        density = jsp.stats.gaussian_kde(20.0 + x.T)
        return -density.logpdf(20.0 + normal(2, 6, seed=8))

    return behind_layers(loss, outputs=2, rows=16)


@program("jax")
def linalg_of_solutions():
    def loss(x):
        matrix = definite(x)
        right = x.T
        lower = jsp.linalg.cholesky(matrix, lower=True)
        solved = jsp.linalg.solve(matrix, right, assume_a="pos")
        solved += jsp.linalg.cho_solve((lower, True), right)
        factors = jsp.linalg.lu_factor(matrix)
        solved += jsp.linalg.lu_solve(factors, right)
        solved += jsp.linalg.solve_triangular(lower, right, lower=True)
        total = jnp.sum(solved**2)
        determinant = jsp.linalg.det(matrix)
        total += jnp.log(determinant)
        return total + jsp.linalg.inv(matrix).sum()

    return behind_layers(loss, outputs=6)


@program("jax")
def linalg_of_factors():
    def loss(x):
        matrix = definite(x)
        matrix += jnp.diag(jnp.arange(5.0))
        values, _ = jsp.linalg.eigh(matrix)
        q, r = jsp.linalg.qr(x, mode="economic")
        singular = jsp.linalg.svd(x, compute_uv=False)
        total = jnp.sum(jnp.log(values))
        total += jnp.sum(r**2)
        total += jnp.sum(singular)
        return total + jnp.sum(q[0] ** 2)

    return behind_layers(loss, outputs=5)


@program("jax")
def linalg_of_exponentials():
    """A matrix exponential, as in flows and continuous-time chains: its products are its own."""

    def loss(x):
        rates = x.reshape(2, 4, 4) / 2
        exponentials = jax.vmap(jsp.linalg.expm)(rates)
        moved = exponentials @ jnp.ones(4)
        return jnp.square(moved)

    return behind_layers(loss, outputs=4)


@program("jax")
def linalg_of_shapes():
    def loss(x):
        blocks = jsp.linalg.block_diag(x[:2, :2], x[2:5, 2:5])
        bands = jsp.linalg.toeplitz(x[0])
        product = blocks @ bands[:5, :3]
        total = jnp.sum(product**2)
        product = bands @ x.T
        return total + jnp.sum(product**2)

    return behind_layers(loss)


@program("jax")
def signal_of_filters():
    """Learned filters over signals, by convolutions that are asked for by name."""

    def loss(x):
        filters = x[:3, :5]
        noise = normal(3, 20, seed=9)
        convolve = functools.partial(jsp.signal.convolve, mode="same")
        filtered = jax.vmap(convolve)(noise, filters)
        image = normal(6, 6, seed=10)
        blurred = jsp.signal.convolve2d(image, x[3:6, :3], mode="valid")
        lags = jsp.signal.correlate(filtered[0], x[6], mode="valid")
        total = jnp.mean(filtered**2)
        total += jnp.mean(jnp.abs(blurred))
        return total + jnp.mean(lags**2)

    return behind_layers(loss)


@program("jax")
def signal_of_spectra():
    def loss(x):
        waves = x.reshape(2, -1)
        _, _, spectra = jsp.signal.stft(waves, nperseg=8)
        _, power = jsp.signal.welch(waves, nperseg=8)
        convolved = jsp.signal.fftconvolve(waves[0], x[0])
        steady = jsp.signal.detrend(waves)
        magnitudes = jnp.abs(spectra)
        total = jnp.mean(magnitudes**2)
        log_power = jnp.log(power + 0.1)
        total += jnp.mean(log_power)
        total += jnp.mean(convolved**2)
        return total + jnp.mean(steady**2)

    return behind_layers(loss)


@program("jax")
def fft_of_cosines():
    def loss(x):
        coefficients = jsp.fft.dct(x, norm="ortho")
        again = jsp.fft.idct(coefficients * 0.9, norm="ortho")
        size = jnp.mean(jnp.abs(coefficients))
        error = again - x
        return size + jnp.mean(error**2)

    return behind_layers(loss)


@program("jax")
def warped_images():
    """`map_coordinates` and an interpolator at places that are learned."""
    image = normal(8, 8, seed=11)

    def loss(x):
        places = 3.5 + 2.0 * jnp.tanh(x)
        rows, columns = places[:, :4], places[:, 4:]
        pixels = jsp.ndimage.map_coordinates(image, [rows, columns], order=1)
        grid = (jnp.arange(8.0), jnp.arange(8.0))
        interpolate = jsp.interpolate.RegularGridInterpolator(
            grid, image, method="linear"
        )
        squares = pixels**2
        points = jnp.stack([rows, columns], axis=-1)
        return squares + interpolate(points)

    return behind_layers(loss)


@program("jax")
def integral_of_a_curve():
    def loss(x):
        return jsp.integrate.trapezoid(jnp.cos(x) ** 2, dx=0.1, axis=-1)

    return behind_layers(loss)


@program("jax")
def solution_by_conjugate_gradients():
    """`sparse.linalg.cg` with a product of the user, and its implicit derivative."""

    def loss(x):
        matrix = definite(x)
        right = normal(6, seed=12)

        def multiply(v):
            return matrix @ v

        solved, _ = jsp.sparse.linalg.cg(multiply, right, maxiter=12)
        other, _ = jsp.sparse.linalg.bicgstab(multiply, right, maxiter=12)
        return jnp.sum(solved**2) + jnp.sum(other**2)

    return behind_layers(loss, outputs=6)


@program("jax")
def rotations():
    """Poses from quaternions, applied to points."""

    def loss(x):
        rotations = jsp.spatial.transform.Rotation.from_quat(x[:, :4])
        points = normal(8, 3, seed=13)
        rotated = rotations.apply(points)
        error = rotated - normal(8, 3, seed=14)
        return jnp.mean(error**2)

    return behind_layers(loss, outputs=4)


@program("jax")
def vector_quantization():
    """The nearest of some codes by `cluster.vq`: integers, and distances with a derivative."""
    params = {
        "in": dense(6, 4, seed=1),
        "codes": normal(5, 4, seed=2),
        "out": weight(4, 6, seed=3),
    }

    def loss(params, x):
        z = apply_dense(params["in"], x)
        codes, distances = jsp.cluster.vq.vq(z, params["codes"])
        decoded = params["codes"][codes] @ params["out"]
        commitment = jnp.mean(distances)
        error = decoded - x
        return commitment + jnp.mean(error**2), {"codes": codes}

    return Program(loss, params, normal(12, 6, seed=4))
